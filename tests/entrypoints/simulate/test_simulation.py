"""Whole simulations: cases worked out by hand, invariants under pressure, and steps of several tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton.entrypoints.simulate.cost_model import Linear
from baton.entrypoints.simulate.job_records import JobRecord
from baton.entrypoints.simulate.simulation import SimulationStuck
from baton.radix.invariants import InvariantError
from baton.scheduler.policies.registry import POLICIES
from tests.doubles.simulated import SECOND, USUAL, crowd, simulation, talk


def times(record: JobRecord) -> list[tuple[float, float, float]]:
    """(sent, first token, end) of each turn."""
    return [(turn.sent, turn.first_token, turn.end) for turn in record.turns]


@pytest.mark.parametrize("burst", [1, 16])
def test_two_job_schedule_matches_hand_computed_times(burst: int) -> None:
    """a: prompt in second 0; b, which comes then, in second 1; a's two other tokens in seconds 2 and 3."""
    a, b = talk("a", 0.0, (10, 3, 5.0), (4, 2, 0.0)), talk("b", 0.5, (10, 1, 0.0))
    first, second = simulation([a, b], burst=burst).run()
    assert times(first) == [(0.0, 1.0, 4.0), (9.0, 10.0, 11.0)]
    assert times(second) == [(0.5, 2.0, 2.0)]
    assert (first.duration, first.service, second.duration) == (11.0, 6.0, 1.5)
    assert [(turn.prompt, turn.kept, turn.found, turn.recomputed, turn.output) for turn in first.turns] == [
        (10, 0, 0, 0, 3),
        (16, 12, 12, 0, 2),
    ]


def test_evicted_tokens_are_recomputed() -> None:
    a = talk("a", 0.0, (40, 3, 30.0), (4, 2, 0.0))
    b = talk("b", 5.0, (90, 3, 0.0))
    first, _ = simulation([a, b], pool=120, max_new_tokens=8).run()
    back = first.turns[1]
    assert back.found < 30 and back.recomputed == 42 - back.found


def test_step_waits_for_layerwise_host_loads() -> None:
    cost = Linear(fixed_s=1.0, prompt_token_s=0, decode_row_s=0, context_token_s=0, load_token_s=0.5, layers=4)
    a = talk("a", 0.0, (40, 3, 30.0), (4, 2, 0.0))
    b = talk("b", 5.0, (90, 3, 0.0))
    first, _ = simulation([a, b], pool=120, max_new_tokens=8, host=400, cost=cost).run()
    back = first.turns[1]
    assert back.from_host > 10 and back.recomputed == 0
    assert back.first_token - back.sent == 0.5 * back.from_host + 0.25


@pytest.mark.parametrize("pin_s", [0.0, 60.0])
def test_pin_keeps_kv_that_would_be_evicted(pin_s: float) -> None:
    """Beside c, which runs all the while, there is room for b only if a's KV leaves."""
    a = talk("a", 0.0, (40, 3, 20.0), (4, 2, 0.0))
    c, b = talk("c", 4.0, (10, 24, 0.0)), talk("b", 6.0, (90, 3, 0.0))
    options = {"pool": 150, "max_new_tokens": 24, "pin_s": pin_s, "lease_protection": 100.0}
    first, _, last = simulation([a, c, b], **options).run()
    assert (first.turns[1].found == 42) == (pin_s > 0)
    assert (last.turns[0].first_token > first.turns[1].first_token) == (pin_s > 0)


def test_tool_calls_are_traced_before_the_next_turn() -> None:
    played = simulation([talk("a", 0.0, (10, 3, 5.0), (4, 2, 0.0))])
    played.scheduler.trace_jobs()
    played.run()
    events = played.scheduler.take_job_events()
    assert [event["event"] for event in events] == [
        "arrival", "departure", "called", "returned", "arrival", "departure"
    ]  # fmt: skip
    assert [event["is_last_step"] for event in events if event["event"] == "departure"] == [False, True]


@pytest.mark.parametrize("pin_s", [6.0, 7.0, 8.0, 9.0])
def test_burst_ends_when_an_awaited_lease_expires(pin_s: float) -> None:
    """As above; b comes in when the pin has lapsed."""
    a = talk("a", 0.0, (40, 3, 30.0), (4, 2, 0.0))
    c, b = talk("c", 4.0, (10, 24, 0.0)), talk("b", 6.0, (90, 3, 0.0))
    options = {"pool": 150, "max_new_tokens": 24, "pin_s": pin_s, "lease_protection": 100.0}
    plain, fast = (simulation([a, c, b], burst=burst, **options).run() for burst in (1, 16))
    assert [times(record) for record in fast] == [times(record) for record in plain]
    assert plain[2].turns[0].first_token == 3.0 + pin_s + 1


PRESSURE: list[dict[str, Any]] = [
    {},
    {"pin_s": 2.0},
    {"host": 2000},
    {"host": 6000, "pin_s": 0.5},
    {"page_size": 16},
    {"enable_mixed_chunk": True},
    {"sizes": {"states": 6}},
    {"sizes": {"states": 6, "host_states": 12}, "host": 2000, "page_size": 16},
    {"sizes": {"states": 6}, "enable_mixed_chunk": True, "pin_s": 2.0},
    {"sizes": {"window": 32, "window_tokens": 320}},
    {"sizes": {"window": 32, "window_tokens": 352}, "page_size": 16, "pin_s": 2.0},
]


@pytest.mark.parametrize("options", PRESSURE, ids=str)
@pytest.mark.parametrize("burst", [1, 16])
def test_invariants_hold_under_memory_pressure(options: dict[str, Any], burst: int) -> None:
    jobs = crowd(12)
    played = simulation(jobs, cost=USUAL, pool=1600, burst=burst, check_every=5, chunked_prefill_size=256, **options)
    check_ended(played.run())
    stats = played.scheduler.stats()
    assert stats.evicted_tokens > 0 or options.get("host")
    assert stats.free_tokens + stats.evictable_tokens + stats.protected_tokens + stats.private_tokens == 1600
    assert played.scheduler.is_idle and played.jobs_left == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_completes_all_jobs(policy: str) -> None:
    jobs = crowd(12, seed=1)
    played = simulation(jobs, cost=USUAL, pool=1600, burst=16, check_every=20, schedule_policy=policy)
    check_ended(played.run())


def check_ended(records: list[JobRecord]) -> None:
    for record in records:
        assert not record.refused and record.end >= record.job.arrival
        assert [turn.output for turn in record.turns] == [turn.output for turn in record.job.turns]
        assert all(turn.sent < turn.first_token <= turn.end for turn in record.turns)
        assert record.service > 0


@pytest.mark.parametrize("burst", [1, 16])
def test_burst_breaks_no_lease_that_single_steps_keep(burst: int) -> None:
    """Five rows want 46 tokens where 41 are free; but the first ends after two, and leaves 12 to the others."""
    a = talk("a", 0.0, (40, 3, 50.0), (4, 2, 0.0))
    others = [talk(str(n), 5.0, (10, 3 if n == 0 else 12, 0.0)) for n in range(5)]
    played = simulation([a, *others], pool=42 + 5 * 10 + 41, max_new_tokens=12, pin_s=100.0, burst=burst)
    first = played.run()[0]
    assert played.scheduler.lease_counts.broken == 0 and first.turns[1].found == 42


def test_bursts_change_no_times_without_waiting_requests() -> None:
    plain, fast = (simulation(crowd(12, rate=1.0), cost=USUAL, pool=20_000, burst=b, check_every=0) for b in (1, 16))
    for one, many in zip(plain.run(), fast.run()):
        assert [turn.found for turn in one.turns] == [turn.found for turn in many.turns]
        for before, after in zip(times(one), times(many)):
            assert after == pytest.approx(before)
    assert fast.steps < plain.steps / 3
    assert fast.busy_s == pytest.approx(plain.busy_s)


def test_chunked_prompt_lets_others_decode_between_chunks() -> None:
    """b's prompt takes four steps; a gets a token after each, also in bursts."""
    a, b = talk("a", 0.0, (10, 40, 0.0)), talk("b", 4.5, (200, 8, 0.0))
    plain, fast = (simulation([a, b], burst=burst, chunked_prefill_size=64).run() for burst in (1, 16))
    assert [times(record) for record in fast] == [times(record) for record in plain]
    assert plain[1].turns[0].first_token == 5.0 + 4 + 3


def test_unclaimed_pin_expires_at_its_deadline() -> None:
    """It ends at its deadline, though nothing else happens then."""
    played = simulation([talk("a", 0.0, (10, 3, 50.0), (4, 2, 0.0))], pin_s=7.0)
    played.scheduler.trace_jobs()
    played.run()
    (unpinned,) = [event for event in played.scheduler.take_job_events() if event["event"] == "unpinned"]
    assert unpinned["reason"] == "expired" and unpinned["time"] == 10.0


def test_bursts_give_equal_outputs_with_waiting_requests() -> None:
    plain, fast = (simulation(crowd(16), cost=USUAL, pool=1600, burst=b, check_every=0) for b in (1, 16))
    before, after = plain.run(), fast.run()
    assert [[t.output for t in r.turns] for r in before] == [[t.output for t in r.turns] for r in after]
    assert sum(r.service for r in after) == pytest.approx(sum(r.service for r in before), rel=0.1)
    assert fast.steps < plain.steps


def test_reserve_decays_equally_in_bursts() -> None:
    job = talk("a", 0.0, (10, 60, 0.0))
    ratios = []
    for burst in (1, 16):
        played = simulation([job], burst=burst)
        played.run()
        ratios.append(played.scheduler._reserve._ratio)
    assert ratios[0] == pytest.approx(ratios[1]) and ratios[0] < 0.7


def test_job_that_cannot_fit_is_refused_with_reason() -> None:
    small, large = talk("a", 0.0, (10, 2, 0.0)), talk("b", 1.0, (10, 2, 1.0), (900, 2, 0.0))
    first, second = simulation([small, large], pool=512).run()
    assert not first.refused and "can never fit" in second.refused and len(second.turns) == 2


def test_stuck_scheduler_is_detected() -> None:
    played = simulation([talk("a", 0.0, (10, 2, 0.0))])
    played.scheduler.next_batch = lambda now: None  # type: ignore[method-assign]
    with pytest.raises(SimulationStuck, match=r"1 requests wait, and no event can change that: \[Request\(a\.0"):
        played.run()


def test_leaked_slots_are_detected() -> None:
    played = simulation([talk("a", 0.0, (10, 3, 5.0), (4, 2, 0.0))], check_every=1)
    played.step()
    none = np.zeros(1, dtype=np.int32)
    played.engine.cache.allocator.alloc_extend(none, none + 3, none)  # which no request owns
    with pytest.raises(InvariantError, match="3 tokens of the pool have no owner"):
        played.run()


def test_single_row_serves_jobs_in_order() -> None:
    """Three jobs and room for one row: each waits for those before it."""
    jobs = [talk(name, 0.0, (10, 3, 0.0)) for name in "abc"]
    records = simulation(jobs, cost=SECOND, max_running_requests=1).run()
    assert [record.turns[0].first_token for record in records] == [1.0, 4.0, 7.0]
