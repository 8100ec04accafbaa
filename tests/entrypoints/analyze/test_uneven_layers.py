"""The report's parts on recurrent states and sliding windows, and the advice on tokens that were computed again."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.analyze.analysis import Analysis
from baton.entrypoints.analyze.log.log_reader import LogStory
from baton.entrypoints.analyze.log.logged_request import LoggedRequest
from baton.entrypoints.analyze.log.prompt_text import id_units
from baton.entrypoints.analyze.log_report import make_report
from baton.entrypoints.analyze.miss_advice import advise
from baton.entrypoints.analyze.model_size import ModelSize
from baton.entrypoints.analyze.pool_sizes import GIB, PoolSizes
from baton.entrypoints.analyze.uneven_layers import with_states
from baton.entrypoints.server_args import parse_command_line
from tests.entrypoints.analyze.test_analysis import make_agents, request

HYBRID = ModelSize(bytes_per_token=1000, bytes_per_state=10**6)
WINDOWED = ModelSize(bytes_per_token=6000, window=100, bytes_per_window_token=5000, context_length=2048)


def report_of(
    model: ModelSize | None, requests: list[LoggedRequest], pool: int | None = None, reach: tuple = (0.8, 0.95, 0.99)
) -> dict[str, Any]:
    has_states = model is not None and model.bytes_per_state > 0
    analysis = Analysis(id_units(1), max_bytes=0, has_times=requests[0].time is not None, has_states=has_states)
    for each in requests:
        analysis.add_request(each)
    analysis.end_log()
    return make_report(analysis, LogStory("x"), sizes=PoolSizes(model), pool_tokens=pool, reach=reach)


def test_as_many_states_as_conversations_are_recommended() -> None:
    """Ten conversations in turn: each needs the state of its last turn, and a running request three."""
    states = report_of(HYBRID, make_agents(1, 10, 6))["states"]
    assert states["turns"] == 50 and states["older_turns"] == 0
    found = {point["states"]: point["turns_found"] for point in states["by_number"]}
    assert found[8] < 0.3 and found[11] == 1.0 and max(found) == 11
    assert states["endless"] == {name: states["by_number"][-1][name] for name in ("turns_found", "hit_rate")}
    assert states["by_tier"] == {"device": 11, "host": 11, "disk": 11}
    assert states["max_states"] == 11 + 3 and states["max_states_gib"] == (14 + 2) * 10**6 / GIB
    assert states["by_number"][0]["gib"] == (4 + 2) * 10**6 / GIB


def test_concurrent_requests_need_states_of_their_own() -> None:
    requests = make_agents(1, 10, 6)
    for each in requests:
        each.seconds = 3.5  # they arrive a second apart
    states = report_of(HYBRID, requests)["states"]
    assert states["of_running_requests"] == 3 * 4 and states["max_states"] == 11 + 12


def test_smaller_reach_needs_fewer_states() -> None:
    """Half of the turns are those of two busy conversations."""
    calm, busy = make_agents(1, 40, 3), make_agents(2, 2, 60)
    mixed = [each for pair in zip(calm, busy) for each in pair]
    for each in mixed:
        each.time = None
    wide, narrow = report_of(HYBRID, mixed)["states"], report_of(HYBRID, mixed, reach=(0.4, 0.95, 0.99))["states"]
    assert narrow["by_tier"]["device"] < wide["by_tier"]["host"]
    assert narrow["by_tier"]["device"] <= 8 and narrow["reach"] == 0.4


def test_host_and_disk_have_room_for_states_and_tokens() -> None:
    """The server divides them as the device's memory, so each kind must fit into its share."""
    report = report_of(HYBRID, make_agents(1, 10, 6), reach=(0.1, 0.95, 0.99))
    device, host, _ = report["recommended"]
    share = device["gib"] / (device["gib"] + device["states_gib"])
    assert 0 < share < 1 and host["tokens"] is not None
    kv, states = host["tokens"] * 1000 / GIB, (host["states"] + 2) * 10**6 / GIB
    assert host["gib"] == pytest.approx(max(kv / share, states / (1 - share)))
    args = parse_command_line(["--model-path", "m", *report["flags"].split()])
    assert args.scheduler.max_states == report["states"]["max_states"]
    assert args.tiers.host_cache_gb >= host["gib"]


@pytest.mark.parametrize(("tokens", "count", "size"), [(30_000, 10, 60.0), (1000, 98, 200.0)])
def test_larger_need_decides_about_the_host(tokens: int, count: int, size: float) -> None:
    """KV and states take as much on the device, so each gets half of the host."""
    sizes = PoolSizes(ModelSize(bytes_per_token=GIB // 1000, bytes_per_state=GIB))
    states = {"max_states": 98, "max_states_gib": 100.0, "by_tier": {"host": count}}
    device = {"tier": "device", "tokens": 10**5, "gib": 100.0}
    _, host = with_states([device, {"tier": "host", "tokens": tokens, "gib": tokens / 1000}], states, sizes)
    assert host["gib"] == size and host["states"] == count


def test_log_without_turns_has_no_share_of_turns() -> None:
    states = report_of(HYBRID, [request([number] * 50, [1, 2], at=float(number)) for number in range(3, 9)])["states"]
    assert states["turns"] == 0 and states["endless"] == {"turns_found": None, "hit_rate": 0.0}
    assert states["max_states"] == 4 + 3


def test_sizes_of_the_curve_are_those_of_two_pools() -> None:
    report = report_of(WINDOWED, make_agents(1, 400, 3), pool=50_000)
    sizes, windows = PoolSizes(WINDOWED), report["windows"]
    assert report["states"] is None and report["kv_bytes_per_token"] == 6000
    assert 0 < windows["window_tokens"] == sizes.window_tokens(50_000) <= 10_000
    assert windows["gib"] == (50_000 * 1000 + windows["window_tokens"] * 5000) / GIB == report["turns"]["pool_gib"]
    assert windows["shared_gib"] == 50_000 * 6000 / GIB
    for point in report["hit_rate"]["by_size"]:
        assert point["gib"] == sizes.device_gib(point["tokens"])
    largest = report["hit_rate"]["by_size"][-1]
    assert largest["gib"] < largest["tokens"] * 6000 / GIB / 2
    device, host, _ = report["recommended"]
    assert device["gib"] == sizes.device_gib(device["tokens"])
    assert host["tokens"] is None or host["gib"] == host["tokens"] * 6000 / GIB


def test_plain_models_have_neither_part() -> None:
    for model in (None, ModelSize(bytes_per_token=1000)):
        report = report_of(model, make_agents(1, 3, 3))
        assert report["states"] is None and report["windows"] is None and report["advice"] == []
        assert "states" not in report["recommended"][0] and "--max-states" not in report["flags"]


def missing(*requests: LoggedRequest, **missed: int) -> list[LoggedRequest]:
    requests[-1].missed = missed
    return list(requests)


def test_advice_on_missing_states_names_the_number() -> None:
    requests = missing(*make_agents(1, 10, 6), no_state=1234, unseen=5)
    (advice,) = report_of(HYBRID, requests)["advice"]
    assert advice.startswith("no_state: 1,234 prompt tokens (") and "of 1 request had" in advice
    assert "asks for --max-states of at least 14. If the server had as many, states were lost to concurrent" in advice
    assert "--host-cache-gb" in advice and "retain_states" not in advice
    (general,) = report_of(None, requests)["advice"]
    assert "Raise --max-states (--model FOLDER" in general and "retain_states" in general


def test_advice_without_a_sufficient_number_is_as_many_as_possible() -> None:
    row = {"reason": "no_state", "tokens": 1, "requests": 2}
    (advice,) = advise([row], 10, {"max_states": None, "older_turns": 0}, None)
    assert advice.startswith("no_state: 1 prompt token (10.0% of all) of 2 requests had")
    assert "Set --max-states as high as memory allows" in advice


def test_advice_on_returns_to_earlier_turns() -> None:
    first = request(list(range(50)), [60, 61, 62])
    second = request([*range(50), 60, 61, 62, 70, 71, 72], [80, 81])
    edited = request([*range(50), 60, 61, 62, 75, 76], [80, 81])
    (advice,) = report_of(HYBRID, missing(first, second, edited, no_state=3))["advice"]
    assert "1 request went back to an earlier turn: retain_states of 2 or more" in advice


def test_advice_on_missing_windows_names_the_ratio() -> None:
    requests = missing(*make_agents(1, 10, 6), no_window=77)
    (advice,) = report_of(WINDOWED, requests, pool=50_000)["advice"]
    windows = PoolSizes(WINDOWED).window_tokens(50_000)
    assert advice.startswith("no_window: 77 prompt tokens (") and f"has {windows:,} for windows" in advice
    ratio = float(advice.partition("--swa-full-tokens-ratio ")[2].split()[0].rstrip("."))
    assert windows / 50_000 < ratio <= 1.0 and "one pool" in advice
    (general,) = report_of(None, requests)["advice"]
    assert "Raise --swa-full-tokens-ratio" in general


def test_reasons_without_tokens_give_no_advice() -> None:
    requests = missing(*make_agents(1, 2, 2), no_state=0, no_window=0, evicted=50)
    assert report_of(HYBRID, requests)["advice"] == []
