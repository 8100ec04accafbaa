"""Cache reports: exact against a per-token twin in the simulation, and each reason by itself."""

from __future__ import annotations

from typing import Any

import pytest

from baton.radix.tiers.host_tier import HostPolicy
from baton.scheduler.cache_report import CacheReporter
from baton.scheduler.outcome import CacheReport, MissedSpan
from baton.scheduler.policies.registry import POLICIES
from baton.scheduler.request_spec import LogprobOptions, Predecessor
from tests.doubles.cache_twin import CacheTwin
from tests.doubles.scheduler_harness import PAGES, Harness
from tests.doubles.simulation import SEED, Simulation
from tests.doubles.specs import make_spec

LASTING = 1e6
"""A history that forgets nothing, as a multiple of the pool."""

SCENES: dict[str, dict[str, Any]] = {
    "device": {},
    "jobs": {"jobs": True, "unwanted": 0.3, "depth": 2},
    "host": {"host_ratio": 2.0, "jobs": True, "unwanted": 0.3, "depth": 2},
    "disk": {"host_ratio": 1.0, "jobs": True, "faults": True},
    "write-back": {"host_ratio": 2.0, "faults": True, "host_policy": HostPolicy(write_back=True)},
}


def compare(seed: int, steps: int, patch: pytest.MonkeyPatch, **options: Any) -> CacheTwin:
    print(f"BATON_SIM_SEED={seed}")
    simulation = Simulation(seed, cache_history=LASTING, clients=True, grammars=False, check_every=9, **options)
    twin = CacheTwin(simulation.harness.scheduler)
    twin.attach(patch)
    simulation.run(steps)
    assert not twin.errors, twin.errors[0]
    assert twin.reports > 10
    return twin


@PAGES
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("offset", range(2))
def test_reports_are_exact(page_size: int, scene: str, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = sorted(POLICIES)[(offset + len(scene)) % len(POLICIES)]
    more: dict[str, Any] = {"block_tokens": max(8, page_size)} if scene == "disk" else {}
    compare(SEED + 900 + offset, 120, monkeypatch, page_size=page_size, policy=policy, **SCENES[scene], **more)


@pytest.mark.slow
@PAGES
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("offset", range(40))
def test_reports_are_exact_for_more_seeds(
    page_size: int, scene: str, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = sorted(POLICIES)[(offset + len(scene)) % len(POLICIES)]
    more: dict[str, Any] = {"block_tokens": max(8, page_size)} if scene == "disk" else {}
    compare(SEED + 1000 + offset, 200, monkeypatch, page_size=page_size, policy=policy, **SCENES[scene], **more)


def test_simulated_reports_have_every_reason() -> None:
    """Some of them are rare; a few seeds bring them all."""
    missing = {"unseen", "diverged", "evicted", "expired", "dropped", "namespace", "page", "required"}
    scenes: list[dict[str, Any]] = [
        {"policy": "fcfs", "page_size": 16},
        {"policy": "fcfs", "host_ratio": 1.0, "jobs": True},
    ]
    for offset in range(40):
        with pytest.MonkeyPatch.context() as patch:
            missing -= compare(SEED + offset, 120, patch, **scenes[offset % len(scenes)]).compared.keys()
        if not missing:
            return
    raise AssertionError(f"no seed brought {missing}")


def test_reports_without_a_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = compare(SEED, 100, monkeypatch, disable_radix_cache=True)
    assert twin.compared.keys() == {"disabled", "required"}


@PAGES
def test_bounded_history_forgets_the_oldest_and_never_invents(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten token counts as unseen, or as diverged; all others keep their reasons."""
    simulation = Simulation(SEED, cache_history=0.5, page_size=page_size, grammars=False)
    twin, forgotten, told = CacheTwin(simulation.harness.scheduler), 0, 0
    history = simulation.harness.scheduler._history

    def check(request: Any, now: float) -> None:
        nonlocal forgotten, told
        twin.walk()
        assert history.departed_tokens <= history.max_tokens
        for mine, theirs in zip(_reasons(request.cache_report), _reasons(twin.expected(request, now)), strict=True):
            assert mine == theirs or mine in ("unseen", "diverged")
            forgotten += mine != theirs
            told += mine == theirs == "evicted"

    twin._compare = check  # type: ignore[method-assign]
    twin.attach(monkeypatch)
    simulation.run(400)
    assert not twin.errors, twin.errors[0]
    assert forgotten and (told or page_size == 64)


def _reasons(report: CacheReport | None) -> list[str]:
    assert report is not None
    return [span.reason for span in report.missed for _ in range(span.tokens)]


# -- one reason at a time ----------------------------------------------------------------------------------------------


def missed(harness: Harness, rid: str) -> list[tuple[str, int, int]]:
    """(reason, start, tokens) of a request's spans, the last token aside."""
    report = report_of(harness, rid)
    assert report.missed[-1].reason == "required"
    return [(span.reason, span.start, span.tokens) for span in report.missed[:-1]]


def report_of(harness: Harness, rid: str) -> CacheReport:
    request = harness.outcomes[rid, 0].request
    assert request is not None and request.cache_report is not None
    return request.cache_report


def serve(harness: Harness, rid: str, prompt: list[int], new: int = 1, **more: Any) -> CacheReport:
    harness.add(rid, prompt, new, ignore_eos=True, **more)
    harness.run()
    return report_of(harness, rid)


def numbers(start: int, count: int) -> list[int]:
    return [(start + place) % 997 for place in range(count)]


def test_first_prompt_was_never_seen_and_its_repeat_computes_one_token() -> None:
    harness = Harness()
    assert serve(harness, "a", numbers(0, 20)).missed == (
        MissedSpan("unseen", 0, 19), MissedSpan("required", 19, 1),
    )  # fmt: skip
    assert serve(harness, "b", numbers(0, 20)).missed == (MissedSpan("required", 19, 1),)


def test_evictions_name_the_own_request_and_no_other_client() -> None:
    harness = Harness(num_tokens=256)
    serve(harness, "mine", numbers(0, 100), client="alice")
    serve(harness, "theirs", numbers(300, 200), client="bob")
    evicted = serve(harness, "again", numbers(0, 100), client="alice").missed[0]
    assert (evicted.reason, evicted.by, evicted.tokens) == ("evicted", "another client", 43)
    assert evicted.seconds_ago is not None and evicted.seconds_ago > 0
    serve(harness, "large", numbers(600, 200), client="alice")
    assert report_of(harness, "large").missed[0].reason == "unseen"
    assert serve(harness, "third", numbers(0, 100), client="alice").missed[0].by == "large"


def test_running_requests_evict_for_their_next_tokens() -> None:
    harness = Harness(num_tokens=128)
    serve(harness, "old", numbers(0, 60))
    serve(harness, "long", numbers(300, 20), 100)
    assert serve(harness, "again", numbers(0, 60)).missed[0].by == "running requests"


def test_kv_of_an_expired_lease_is_expired_unless_it_was_used_again() -> None:
    for uses, reason in ((0, "expired"), (1, "evicted")):
        harness = Harness(num_tokens=256)
        serve(harness, "turn", numbers(0, 100), retain_ttl=5.0)
        harness.now += 10.0
        harness.step()
        for number in range(uses):
            serve(harness, f"use{number}", [*numbers(0, 100), 5])
        serve(harness, "large", numbers(300, 240))
        assert missed(harness, "large") == [("unseen", 0, 239)]
        assert {each for each, _, _ in missed_of(harness, numbers(0, 100))} == {reason}


def missed_of(harness: Harness, prompt: list[int]) -> list[tuple[str, int, int]]:
    serve(harness, "asked again", prompt)
    return missed(harness, "asked again")


@pytest.mark.parametrize("unasked", [False, True])
def test_lease_that_broke_for_memory_counts_as_evicted(unasked: bool) -> None:
    """KV of an unasked first turn is then evicted before all else, and still nothing has given it up."""
    harness = Harness(num_tokens=256)
    serve(harness, "turn", numbers(0, 100), retain_ttl=1000.0, unasked=unasked)
    serve(harness, "large", numbers(300, 240))
    assert harness.scheduler.lease_counts.broken == 1
    assert {reason for reason, _, _ in missed_of(harness, numbers(0, 100))} == {"evicted"}


@pytest.mark.parametrize("how", ["release", "last step", "end_job", "no_reuse_from"])
def test_kv_that_was_given_up_is_released(how: str) -> None:
    harness = Harness(num_tokens=256, policy="handoff")
    more: dict[str, Any] = {"job_id": "agent"} if how in ("last step", "end_job") else {}
    if how == "no_reuse_from":
        more["no_reuse_from"] = 0
    serve(harness, "turn", numbers(0, 100), retain_ttl=100.0, is_last_step=how == "last step", **more)
    if how == "release":
        assert harness.scheduler.release_leases("turn")
    elif how == "end_job":
        assert harness.scheduler.end_job("", "agent", harness.now) is not None
    elif how == "no_reuse_from":
        assert harness.scheduler.release_leases("turn")
    serve(harness, "large", numbers(300, 240))
    assert {reason for reason, _, _ in missed_of(harness, numbers(0, 100))} == {"released"}


def test_flushed_kv_is_cleared() -> None:
    harness = Harness()
    serve(harness, "a", numbers(0, 20))
    assert harness.scheduler.flush_cache()
    assert missed_of(harness, numbers(0, 20)) == [("cleared", 0, 19)]


def test_next_turn_diverges_where_it_leaves_its_jobs_last_step() -> None:
    harness = Harness()
    serve(harness, "one", numbers(0, 30), job_id="agent")
    report = serve(harness, "two", [*numbers(0, 12), *numbers(500, 30)], job_id="agent")
    assert report.diverged_at == 12 and missed(harness, "two") == [("diverged", 12, 29)]
    said = harness.outcomes["two", 0].tokens
    report = serve(harness, "three", [*numbers(0, 12), *numbers(500, 30), *said, *numbers(700, 9)], job_id="agent")
    assert report.diverged_at is None and [reason for reason, _, _ in missed(harness, "three")] == ["unseen"]


def test_side_task_of_a_job_does_not_make_the_main_one_diverge() -> None:
    harness = Harness()
    serve(harness, "main", numbers(0, 30), job_id="agent")
    serve(harness, "title", [*numbers(0, 5), *numbers(800, 10)], job_id="agent")
    said = harness.outcomes["main", 0].tokens
    report = serve(harness, "main again", [*numbers(0, 30), *said, *numbers(700, 9)], job_id="agent")
    assert report.diverged_at is None and [reason for reason, _, _ in missed(harness, "main again")] == ["unseen"]


def test_chat_turn_diverges_from_the_turn_that_it_should_extend() -> None:
    harness = Harness()
    serve(harness, "one", numbers(0, 30))
    report = serve(harness, "two", [*numbers(0, 29), 990, 991, 992], predecessor=Predecessor("one"))
    assert report.diverged_at == 29 and missed(harness, "two") == [("diverged", 29, 2)]


def test_conversation_may_know_better_where_a_prompt_diverges() -> None:
    harness = Harness()
    serve(harness, "one", numbers(0, 30))
    spec = make_spec("two", [*numbers(0, 12), *numbers(500, 20)], diverged_at=14)
    (request,) = harness.scheduler.add_request(spec, harness.now)
    harness.scheduler.next_batch(harness.now)
    assert request.cache_report is not None and request.cache_report.diverged_at == 14
    assert [(span.reason, span.start, span.tokens) for span in request.cache_report.missed] == [
        ("unseen", 12, 2), ("diverged", 14, 17), ("required", 31, 1),
    ]  # fmt: skip


def test_client_is_told_of_its_own_namespaces_only() -> None:
    harness = Harness()
    serve(harness, "a", numbers(0, 30), client="alice", namespace="old")
    serve(harness, "b", [*numbers(0, 20), *numbers(500, 9)], client="alice", namespace="new")
    assert missed(harness, "b") == [("namespace", 0, 20), ("unseen", 20, 8)]
    serve(harness, "c", numbers(0, 30), client="bob", namespace="bobs")
    assert missed(harness, "c") == [("unseen", 0, 29)]
    serve(harness, "d", numbers(0, 30), client="", namespace="nobodys")
    assert missed(harness, "d") == [("unseen", 0, 29)]


@pytest.mark.parametrize("how", ["expired", "released", "cleared"])
def test_client_is_not_told_of_what_another_had_in_the_cache(how: str) -> None:
    """Else the report would tell which prompts others have sent, and when."""
    for asks, reason in (("bob", "unseen"), ("", "unseen"), ("alice", how)):
        harness = Harness(num_tokens=256, policy="handoff")
        secret = numbers(0, 100)
        serve(harness, "secret", secret, client="alice", job_id="hers", is_last_step=how == "released", retain_ttl=5.0)
        harness.now += 10.0
        if how == "cleared":
            assert harness.scheduler.flush_cache()
        else:
            serve(harness, "large", numbers(300, 255), client="carol")
        report = serve(harness, "probe", secret, client=asks)
        assert {span.reason for span in report.missed[:-1]} == {reason}
        assert all((span.seconds_ago is None) is (asks != "alice") for span in report.missed[:-1])
        assert report_of(harness, "probe").missed[-1] == MissedSpan("required", 99, 1)


def test_client_is_not_told_of_another_ones_tokens_that_fill_no_page() -> None:
    """While they are there, and once they are gone: by them a prompt could be guessed token by token."""
    for known in (40, 48):  # the last page has some of them, or is full
        for asks, told in (("bob", []), ("alice", [("page", 32, 4)])):
            harness = Harness(num_tokens=256, page_size=16)
            serve(harness, "secret", numbers(0, known), client="alice")
            serve(harness, "guess", [*numbers(0, 36), *numbers(700, 9)], client=asks)
            start = 36 if told else 32
            assert missed(harness, "guess") == [*told, ("unseen", start, 44 - start)]


def test_own_tokens_behind_those_of_another_client_keep_their_reason() -> None:
    """They are in a branch of their own, behind a prefix that another client has computed."""
    harness = Harness(num_tokens=256)
    serve(harness, "shared", numbers(0, 50), client="alice")
    serve(harness, "mine", [*numbers(0, 50), *numbers(500, 50)], client="bob")
    serve(harness, "large", numbers(300, 255), client="carol")
    serve(harness, "again", [*numbers(0, 50), *numbers(500, 50), *numbers(800, 9)], client="bob")
    assert missed(harness, "again") == [("unseen", 1, 49), ("evicted", 50, 50), ("unseen", 100, 8)]


def test_prompt_that_left_its_job_diverges_over_another_clients_tokens_too() -> None:
    harness = Harness(num_tokens=256)
    serve(harness, "hers", [*numbers(0, 12), *numbers(500, 30)], client="alice")
    serve(harness, "one", numbers(0, 30), client="bob", job_id="agent")
    serve(harness, "large", numbers(300, 255), client="carol")
    report = serve(harness, "two", [*numbers(0, 12), *numbers(500, 30)], client="bob", job_id="agent")
    assert report.diverged_at == 12 and missed(harness, "two") == [("unseen", 1, 11), ("diverged", 12, 29)]


def test_kv_beyond_a_copied_parent_that_ends_within_a_page_is_not_looked_up() -> None:
    harness = Harness(page_size=16)
    serve(harness, "parent", numbers(0, 30), retain_ttl=100.0)
    for rid in ("one", "two"):
        harness.continue_from("parent", rid, numbers(500, 10), 1, keep_parent=True, ignore_eos=True)
        harness.run()
    assert missed(harness, "two") == [("not_looked_up", 30, 2), ("page", 32, 8)]


@pytest.mark.parametrize(("page_size", "keep_parent"), [(1, True), (1, False), (16, False)])
def test_prompt_sent_again_finds_what_the_cache_has_beyond_its_parent(page_size: int, keep_parent: bool) -> None:
    harness = Harness(page_size=page_size)
    serve(harness, "parent", numbers(0, 30), retain_ttl=100.0)
    for rid, keeps in (("first", True), ("again", keep_parent)):
        harness.continue_from("parent", rid, numbers(500, 40), 1, keep_parent=keeps, ignore_eos=True)
        harness.run()
    found = harness.outcomes["again", 0].request
    assert found is not None and found.inheritance is not None and found.inheritance.took_over
    whole = 70 // page_size * page_size  # of 71 tokens the last has to be computed
    assert found.found.total == whole
    assert missed(harness, "again") == ([("page", whole, 70 - whole)] if whole < 70 else [])


def test_page_remainders() -> None:
    harness = Harness(page_size=16)
    serve(harness, "a", numbers(0, 40))
    serve(harness, "b", [*numbers(0, 36), *numbers(500, 20)])
    assert missed(harness, "b") == [("page", 32, 4), ("unseen", 36, 19)]
    serve(harness, "c", numbers(0, 32))
    assert missed(harness, "c") == [("page", 16, 15)]  # the last token has to be computed, and its page with it


def test_prompt_logprobs_require_their_tokens() -> None:
    harness = Harness()
    serve(harness, "a", numbers(0, 20))
    spec = make_spec("b", numbers(0, 20), logprobs=LogprobOptions(start_len=5))
    (request,) = harness.scheduler.add_request(spec, harness.now)
    harness.scheduler.next_batch(harness.now)
    assert request.cache_report is not None
    assert request.cache_report.missed == (MissedSpan("required", request.found.total, 20 - request.found.total),)
    assert request.found.total == 4


def test_retracted_request_keeps_its_first_report() -> None:
    harness = Harness(num_tokens=128, rows=4)
    for number, rid in enumerate("abc"):
        harness.add(rid, numbers(300 * number, 10), 40, ignore_eos=True)
    harness.run()
    assert harness.scheduler.stats().retractions
    for rid in "abc":
        assert missed(harness, rid) == [("unseen", 0, 9)]


def test_report_that_cannot_be_made_harms_no_request(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("no report today")

    monkeypatch.setattr(CacheReporter, "_missed", fail)
    harness = Harness()
    harness.add("a", numbers(0, 20), 4, ignore_eos=True)
    harness.run()
    outcome = harness.outcomes["a", 0]
    assert len(outcome.tokens) == 4 and outcome.request is not None and outcome.request.cache_report is None
    assert "no report today" in caplog.text
