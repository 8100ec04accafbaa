"""The counts of an analysis beside the curve, and its advice."""

from __future__ import annotations

import random
from array import array

import pytest

from baton.entrypoints.analyze.advice import Tier, ceil_gib, flags, recommend
from baton.entrypoints.analyze.analysis import Analysis
from baton.entrypoints.analyze.log.log_reader import LogStory
from baton.entrypoints.analyze.log.logged_request import LoggedRequest, Units
from baton.entrypoints.analyze.log.prompt_text import id_units
from baton.entrypoints.analyze.log_report import make_report
from baton.entrypoints.analyze.model_size import ModelSize
from baton.entrypoints.analyze.pool_sizes import PoolSizes

REACH = (0.8, 0.95, 0.99)


def ids(values: list[int]) -> bytes:
    return array("i", values).tobytes()


def request(prompt: list[int], output: list[int] | None = None, at: float | None = None, **fields) -> LoggedRequest:
    return LoggedRequest(
        prompt=ids(prompt),
        prompt_tokens=len(prompt),
        outputs=() if output is None else (ids(output),),
        output_tokens=len(output or ()),
        has_outputs=output is not None,
        time=at,
        **fields,
    )


def analysed(*requests: LoggedRequest, page: int = 1, max_bytes: int = 0) -> Analysis:
    analysis = Analysis(id_units(page), max_bytes=max_bytes, has_times=requests[0].time is not None)
    for each in requests:
        analysis.add_request(each)
    analysis.end_log()
    return analysis


def described(tiers: list[Tier], kv_bytes: int) -> list[dict]:
    return [tier.described(PoolSizes(ModelSize(bytes_per_token=kv_bytes))) for tier in tiers]


def test_last_prompt_token_is_always_computed() -> None:
    found = analysed(request([1, 2, 3, 4]), request([1, 2, 3, 4]))
    assert found.totals.endless_hits == 3
    assert analysed(request([1, 2, 3, 4]), request([1, 2, 3, 4]), page=4).totals.endless_hits == 0
    assert analysed(request([1, 2, 3, 4]), request([1, 2, 3, 4, 5]), page=4).totals.endless_hits == 4


def test_last_output_token_has_no_kv() -> None:
    found = analysed(request([1, 2], [3, 4]), request([1, 2, 3, 4, 5]))
    assert found.totals.endless_hits == 3


def test_outputs_can_be_continued_but_are_not_hits_themselves() -> None:
    first = request([1, 2])
    first.outputs, first.output_tokens, first.has_outputs = (ids([3, 4, 5]), ids([6, 7])), 5, True
    found = analysed(first, request([1, 2, 3, 4, 9]), request([1, 2, 6, 9]))
    assert found.totals.endless_hits == 4 + 3 and found.turns.count == 0
    again = analysed(first, first, request([1, 2, 6, 7, 9]), request([1, 2, 3, 4, 5, 9]))
    assert again.totals.endless_hits == 1 + 3 + 4 and again.turns.count == 2


def test_namespaces_share_nothing() -> None:
    assert analysed(request([1, 2, 3]), request([1, 2, 3], namespace="s")).totals.endless_hits == 0


def test_hashed_blocks_count_as_many_tokens() -> None:
    analysis = Analysis(Units(8, 512, "blocks"), max_bytes=0, has_times=True)
    blocks = array("q", [1, 2, 3]).tobytes()
    analysis.add_request(LoggedRequest(prompt=blocks[:16], prompt_tokens=1500, time=0.0))
    analysis.add_request(LoggedRequest(prompt=blocks, prompt_tokens=1536, time=9.0))
    analysis.end_log()
    assert analysis.totals.endless_hits == 1024 and analysis.span == 9.0
    assert analysis.turns.count == 1 and analysis.turns.inherited_units == 2


def test_backward_and_nonfinite_times_are_tolerated() -> None:
    times = [100.0, 50.0, float("nan"), float("inf"), None, 170.0]
    found = analysed(*(request([1, number], [2], at) for number, at in enumerate(times)))
    assert found.span == 70.0 and [point.at for point in found.working_set.points] == sorted(
        point.at for point in found.working_set.points
    )


def make_agents(seed: int, jobs: int, turns: int) -> list[LoggedRequest]:
    rng = random.Random(seed)

    def new(count: int) -> list[int]:
        return [rng.randrange(10**6) for _ in range(count)]

    histories = [new(50) for _ in range(jobs)]
    requests, at = [], 0.0
    for _ in range(turns):
        for job in range(jobs):
            prompt, output = histories[job] + new(10), new(20)
            histories[job] = prompt + output
            requests.append(request(prompt, output, at))
            at += 1.0
    return requests


def test_lost_inheritance_depends_on_pool_size() -> None:
    """Ten jobs in turn: a pool that has room for all but a few of them finds nothing, and a lease everything."""
    analysis = analysed(*make_agents(1, 10, 6))
    story = LogStory("x")

    def turns(pool: int) -> dict:
        return make_report(analysis, story, sizes=PoolSizes(None), pool_tokens=pool, reach=REACH)["turns"]

    small, large = turns(300), turns(10**6)
    assert small["requests"] == 50 and small["requests_gone_on_from"] == 50
    assert small["inherited_tokens"] == sum(10 * (80 + 30 * turn - 1) for turn in range(5))
    assert small["lost_share"] == 1.0 and large["lost_share"] == 0.0
    assert small["gap_s"]["p50"] == pytest.approx(10.0, rel=0.05)
    # Each has 10 s of lease; at the end ten are left that are not continued.
    total = sum(each.prompt_tokens + each.output_tokens for each in make_agents(1, 10, 6))
    assert small["leased_tokens_on_average"] == pytest.approx(10 * total / 59, rel=0.06)


def test_recommended_sizes_reach_the_promised_hit_rate() -> None:
    analysis = analysed(*make_agents(2, 40, 6))
    tiers = recommend(analysis, REACH)
    hits = dict(zip(analysis.curve.grid, analysis.curve.hits()))
    assert tiers[0].tokens is not None and hits[tiers[0].tokens] >= 0.8 * analysis.totals.endless_hits
    assert max(size for size in hits if size < tiers[0].tokens) not in hits or (
        hits[max(size for size in hits if size < tiers[0].tokens)] < 0.8 * analysis.totals.endless_hits
    )
    named = {tier.tier: tier for tier in tiers}
    assert named["host"].tokens is None and "nearly as much" in named["host"].why, "jobs in turn: all or nothing"
    assert flags(described(tiers, 1024)) == f"--max-total-tokens {tiers[0].tokens}"


def test_recommended_pool_fits_the_longest_request() -> None:
    tiers = recommend(analysed(request([1, 2, 3]), request([1, 2, 3]), request(list(range(500)), [1] * 100)), REACH)
    assert tiers[0].tokens == 600 and "longest request" in tiers[0].why


def test_no_size_is_recommended_beyond_the_exact_range() -> None:
    analysis = analysed(*make_agents(3, 60, 6), max_bytes=40_000)
    tiers = recommend(analysis, REACH)
    assert analysis.exact_tokens is not None and tiers[0].tokens is None
    assert f"more than {analysis.exact_tokens:,} tokens" in tiers[0].why and flags(described(tiers, 1)) == ""


def test_recommended_flags_parse_as_server_flags() -> None:
    from baton.entrypoints.server_args import parse_command_line

    rng = random.Random(4)
    documents = [[rng.randrange(10**6) for _ in range(100)] for _ in range(200)]
    requests = [request(documents[min(199, int(rng.expovariate(0.02)))] + [number]) for number in range(2000)]
    tiers = recommend(analysed(*requests), REACH)
    assert all(tier.tokens for tier in tiers)
    line = flags(described(tiers, 100_000), 77)
    args = parse_command_line(["--model-path", "m", *line.split()])
    assert args.scheduler.max_states == 77
    assert args.scheduler.max_total_tokens == tiers[0].tokens and args.tiers.host_cache_gb > 1
    assert args.tiers.disk_cache_gb >= args.tiers.host_cache_gb


@pytest.mark.parametrize(("size", "shown"), [(0.0, 0.0), (1.0, 1.0), (1.01, 1.1), (0.1234, 0.13), (123.4, 130.0)])
def test_gib_sizes_are_rounded_up(size: float, shown: float) -> None:
    assert ceil_gib(size) == shown
