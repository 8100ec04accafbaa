"""Exceptions at every call of the scheduler: the request at fault ends, the others say what they would have said, and
no slot, row, lock or lease is lost."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from baton.scheduler import recovery
from tests.doubles.fault_injection import CallFaults, InjectedFault, inject
from tests.doubles.kv_echo import expected_beams, expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness
from tests.doubles.simulation import SEED, Simulation

START = int(os.environ.get("BATON_FAULT_SEED", "7"))
KINDS: list[dict[str, Any]] = [
    {"page_size": 1},
    {"page_size": 16, "depth": 2},
    {"page_size": 64, "jobs": True, "policy": "handoff"},
    {"page_size": 1, "depth": 2, "host_ratio": 2.0, "jobs": True, "policy": "continuum"},
    {"page_size": 16, "host_ratio": 1.0, "block_tokens": 16},
    {"page_size": 1, "enable_mixed_chunk": True, "policy": "lpm", "unwanted": 0.5},
    {"page_size": 16, "depth": 2, "speculative_algorithm": "NGRAM"},
    {"page_size": 16, "depth": 2, "jobs": True, "prepares": True, "policy": "handoff"},
    {"page_size": 1, "depth": 2, "states": 5},
    {"page_size": 16, "states": 64, "jobs": True, "policy": "handoff", "speculative_algorithm": "NGRAM"},
    {"page_size": 1, "depth": 2, "states": 6, "host_ratio": 3.0},
]
STEPS = 40


def run(kind: int, seed: int, at: int) -> tuple[CallFaults, Simulation]:
    """A simulation in which call number ``at`` fails; -1: none does."""
    faults = CallFaults(at)
    simulation = Simulation(seed, **KINDS[kind])
    inject(simulation.harness, faults)
    simulation.run(STEPS)
    return faults, simulation


def check_one(kind: int, seed: int, at: int) -> int:
    """Returns how many requests the fault ended."""
    print(f"kind {kind}, seed {seed}, call {at}")
    faults, simulation = run(kind, seed, at)
    if faults.place is not None:
        print("failed", faults.place)
    return len(simulation.hit)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_exception_at_random_scheduler_calls_is_contained(kind: int) -> None:
    """Some calls of a run, drawn from one seed; the slow test takes many more."""
    rng = random.Random(START + kind)
    calls = run(kind, SEED + kind, -1)[0].calls
    assert calls > 3000
    hit = [check_one(kind, SEED + kind, rng.randrange(calls)) for _ in range(8)]
    assert sorted(hit)[len(hit) // 2] <= 2, "most faults end one request at most, or a few of one family"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("offset", range(3))
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_exception_at_every_nth_scheduler_call_is_contained(kind: int, offset: int) -> None:
    """About a hundred calls of a run: every n-th from a place that the seed draws. All would take hours."""
    rng = random.Random(START + 100 + 10 * kind + offset)
    seed = SEED + 10 * kind + offset
    calls = run(kind, seed, -1)[0].calls
    stride = calls // 100
    for at in range(rng.randrange(stride), calls, stride):
        check_one(kind, seed, at)


def raise_for(rid: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which raises for the requests of a rid, however often it is asked."""

    def patched(request: Any, *args: Any) -> Any:
        if request.rid == rid:
            raise AssertionError(f"{rid} is impossible")
        return function(request, *args)

    return patched


def finish(harness: Harness) -> None:
    """Some turns do nothing but end a request."""
    for _ in range(100):
        harness.step()
    assert harness.scheduler.is_idle, harness.scheduler.live_requests


def test_request_failing_in_admission_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each place where admission looks at one request: nobody is ended with it, and it is not tried for ever."""
    for owner, name in (
        ("_prefill", "_better_later"),
        ("_reserve", "reserved_tokens"),
        ("_memory", "open_request"),
        ("_prefill", "_add_chunk"),
        ("_policy", "note_admission"),
    ):
        harness = Harness(chunk=32)
        part: Any = getattr(harness.scheduler, owner)
        harness.add("running", [1] * 20, 12)
        harness.step()
        monkeypatch.setattr(part, name, raise_for("bad", getattr(part, name)))
        harness.add("before", [2] * 9, 6)
        harness.add("bad", [3] * 9, 6, n=2)
        harness.continue_from("bad", "child", [1], 4)
        harness.add("after", [4] * 9, 6)
        finish(harness)
        for rid, prompt, new in (("running", [1] * 20, 12), ("before", [2] * 9, 6), ("after", [4] * 9, 6)):
            outcome = harness.outcomes[rid, 0]
            assert outcome.refusal is None and outcome.tokens == expected_output(prompt, new), (name, rid)
        refusals = {key: outcome.refusal for key, outcome in harness.outcomes.items() if outcome.refusal is not None}
        codes = {key: refusal.code for key, refusal in refusals.items()}
        assert codes == {("bad", 0): "request_failed", ("bad", 1): "request_failed", ("child", 0): "parent_failed"}, (
            name
        )
        assert harness.scheduler.stats().failed_requests == 1


def test_failing_policy_order_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(rows=2, policy="lpm")
    monkeypatch.setattr(harness.scheduler._policy, "order", Mock(side_effect=AssertionError))
    for number in range(5):
        harness.add(f"r{number}", [number] * 20, 6)
    finish(harness)
    for number in range(5):
        assert harness.outcomes[f"r{number}", 0].tokens == expected_output([number] * 20, 6)


@PAGES
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at", range(12))
def test_states_of_a_step_that_was_planned_and_not_formed_are_not_used(
    at: int, depth: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step would read what was never written. No request is at fault: one ends only if its newest state was to
    be overwritten, and a step in flight still writes it."""
    harness = Harness(page_size=page_size, num_tokens=4096, depth=depth, states=32, chunk=32)
    copies, calls = harness.scheduler._memory.copies, iter(range(1000))
    confirm = copies.confirm_taken

    def confirm_taken() -> None:
        if next(calls) == at:
            raise InjectedFault
        confirm()

    monkeypatch.setattr(copies, "confirm_taken", confirm_taken)
    harness.add("long", prompt_of(70, 1), 10, retain_ttl=9.0)
    harness.add("search", prompt_of(20, 2), 9, beam_width=3, n=3)
    harness.add("short", prompt_of(9, 3), 12)
    finish(harness)
    assert next(calls) > at
    ended = {rid for (rid, _), outcome in harness.outcomes.items() if outcome.refusal is not None}
    assert len(ended) < depth
    for rid, prompt, new in (("long", prompt_of(70, 1), 10), ("short", prompt_of(9, 3), 12)):
        assert rid in ended or harness.outcomes[rid, 0].tokens == expected_output(prompt, new, stateful=True)
    found = harness.outcomes["search", 0]
    assert found.request is not None
    expected = expected_beams(prompt_of(20, 2), found.request.sampling, stateful=True)
    assert [result.ids.tolist() for result in found.results] == [result.ids.tolist() for result in expected]


def test_request_failing_in_decode_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    harness.add("bad", [1] * 20, 12)
    harness.add("other", [2] * 20, 12)
    harness.add("search", [3] * 20, 6, beam_width=2)
    harness.step()
    tokens: Any = harness.outcomes["bad", 0].request.token_ids  # type: ignore[union-attr]
    impossible = Mock(__len__=Mock(side_effect=tokens.__len__), __getitem__=Mock(side_effect=AssertionError))
    monkeypatch.setattr(harness.outcomes["bad", 0].request, "token_ids", impossible)
    finish(harness)
    codes = {key: outcome.refusal.code for key, outcome in harness.outcomes.items() if outcome.refusal is not None}
    assert codes == {("bad", 0): "request_failed"}
    assert harness.outcomes["other", 0].tokens == expected_output([2] * 20, 12)


def test_prompt_failing_between_chunks_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(chunk=16)
    harness.add("other", [1] * 9, 30)
    harness.add("long", list(range(20)) * 4, 4)
    harness.step()
    harness.step()
    prefill: Any = harness.scheduler._prefill
    assert prefill.prefilling is not None
    monkeypatch.setattr(prefill, "_add_chunk", raise_for("long", prefill._add_chunk))
    finish(harness)
    failed, other = harness.outcomes["long", 0], harness.outcomes["other", 0]
    assert failed.refusal is not None and failed.refusal.code == "request_failed" and not failed.tokens
    assert other.refusal is None and other.tokens == expected_output([1] * 9, 30)


@PAGES
@pytest.mark.parametrize("cause", ["two owners", "the repair fails"])
def test_reset_ends_siblings_and_children_of_kv_holders(
    cause: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Siblings that still wait, children, and their children; requests that hold no KV go on."""
    harness = Harness(rows=2, page_size=page_size, num_tokens=1024)
    harness.add("a", [1] * 20, 20)
    harness.add("b", [2] * 20, 20, n=3)
    harness.continue_from("a", "child", [3], 4)
    harness.continue_from("child", "grandchild", [3], 4)
    harness.continue_from("b", "late", [3], 4, index=2)
    harness.add("waiting", [5] * 20, 6)
    for _ in range(5):
        harness.step()
    holders = [request for request in harness.scheduler.live_requests if request.kv is not None]
    assert [request.key for request in holders] == [("a", 0), ("b", 0)]
    a, b = (request.held_kv for request in holders)
    with monkeypatch.context() as patched:
        if cause == "two owners":
            rows, first = harness.pool.rows, slice(a.tree_len, a.tree_len + page_size)
            rows[a.row, first] = rows[b.row, first]
        else:
            patched.setattr(recovery, "slots_of_tree", Mock(side_effect=MemoryError))
        harness._take(harness.scheduler.contain(RuntimeError("something else"), [], harness.now))
    finish(harness)
    codes = {key: outcome.refusal.code for key, outcome in harness.outcomes.items() if outcome.refusal is not None}
    assert codes == {
        **dict.fromkeys([("a", 0), ("b", 0), ("b", 1), ("b", 2)], "request_failed"),
        **dict.fromkeys([("child", 0), ("grandchild", 0), ("late", 0)], "parent_failed"),
    }
    assert harness.outcomes["waiting", 0].tokens == expected_output([5] * 20, 6)
    assert harness.scheduler.stats().failed_requests == 2
    harness.add("next", [1] * 20, 6)
    finish(harness)
    assert harness.outcomes["next", 0].tokens == expected_output([1] * 20, 6)


@PAGES
def test_all_rows_are_sent_again_after_recovery(page_size: int) -> None:
    """A step that was not formed had taken what was to be reported, or the step runner would read others' KV."""
    harness = Harness(page_size=page_size, num_tokens=2048)
    harness.add("parent", [1] * 20, 4, retain_ttl=1e6)
    harness.run()
    harness.add("plain", [2] * 20, 12)
    harness.add("search", [3] * 20, 6, beam_width=2)
    for _ in range(4):
        harness.step()
    harness.model._mirror[:] = 0
    harness._take(harness.scheduler.contain(RuntimeError(), [], harness.now))
    harness.continue_from("parent", "child", [5], 6)
    finish(harness)
    said = harness.outcomes["parent", 0].tokens
    assert harness.outcomes["child", 0].tokens == expected_output([1] * 20 + said + [5], 6)
    assert harness.outcomes["plain", 0].tokens == expected_output([2] * 20, 12)
    request = harness.outcomes["search", 0].request
    assert request is not None
    expected = expected_beams([3] * 20, request.sampling, None, frozenset())
    assert [result.ids.tolist() for result in harness.outcomes["search", 0].results] == [
        result.ids.tolist() for result in expected
    ]


@PAGES
def test_pages_of_failed_request_are_quarantined_until_step_ends(page_size: int) -> None:
    harness = Harness(page_size=page_size, depth=2, num_tokens=1024)
    harness.add("bad", [1] * 20, 30)
    harness.add("other", [2] * 20, 12)
    harness.step()
    (bad,) = harness.scheduler.live_of("bad")
    kv = bad.held_kv
    written = harness.pool.rows[kv.row, kv.tree_len : kv.length] // page_size
    assert len(written)
    harness._take(harness.scheduler.contain(RuntimeError(), [bad], harness.now))
    assert set(written.tolist()) <= set(harness.allocator.quarantined_pages().tolist())
    finish(harness)
    assert harness.allocator.quarantined_tokens == 0
    assert harness.outcomes["other", 0].tokens == expected_output([2] * 20, 12)


STAGES = ["_end_families", "_find_lost", "_end", "_place", "_recount", "discard_all_kv"]


@pytest.mark.parametrize(
    "kind", [{"page_size": 1}, {"page_size": 16, "depth": 2}, {"page_size": 16, "host_tokens": 2048}]
)
@pytest.mark.parametrize("stage", STAGES)
def test_exception_in_recovery_ends_every_request_once(
    stage: str, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop lives, each request gets one end with a reason, and the next request finds a whole pool."""
    harness = Harness(rows=4, num_tokens=1024, **kind)
    harness.add("kept", [9] * 20, 4, retain_ttl=1e6)
    harness.run()
    harness.add("running", [1] * 20, 20)
    harness.add("siblings", [2] * 20, 20, n=2)
    harness.add("search", [4] * 20, 12, beam_width=2)
    harness.continue_from("running", "child", [3], 4)
    harness.add("waiting", [5] * 20, 6)
    for _ in range(4):
        harness.step()
    scheduler_recovery: Any = harness.scheduler._recovery
    part: Any = scheduler_recovery if stage != "discard_all_kv" else harness.scheduler._memory
    real, failures = getattr(part, stage), [RuntimeError("again")]

    def raise_once(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(part, stage, raise_once)
        if stage == "discard_all_kv":  # it is reached only where the count fails first
            patched.setattr(scheduler_recovery, "_recount", Mock(side_effect=MemoryError))
        (bad, *_) = harness.scheduler.live_of("running")
        harness._take(harness.scheduler.contain(RuntimeError("the first"), [bad], harness.now))
    finish(harness)
    ended = {key: outcome for key, outcome in harness.outcomes.items() if key[0] != "kept"}
    if stage != "_recount":
        assert all(outcome.refusal is not None for outcome in ended.values()), ended
    harness.add("next", [1] * 20, 6)
    finish(harness)
    assert harness.outcomes["next", 0].tokens == expected_output([1] * 20, 6)
