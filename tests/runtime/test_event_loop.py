"""The loop around a real scheduler and the KV-echo model: both ways of running it, and steps that fail."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.entrypoints.http_statuses import status_of
from baton.runtime import event_loop
from baton.runtime.event_loop import HEARTBEAT_S, IDLE_WORK_S, MAX_FAILED_STEPS
from baton.runtime.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    ReleaseRequest,
    RequestError,
)
from baton.scheduler.batch import ScheduleBatch
from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.request_spec import ContinuationSpec
from baton.scheduler.scheduler import Scheduler
from baton.scheduler.stats import SchedulerStats
from tests.doubles.event_loop_rig import Rig, ask
from tests.doubles.kv_echo import expected_output

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


@LOOPS
def test_requests_are_answered(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    prompts = {f"r{n}": list(range(n, n + 20 + 7 * n)) for n in range(5)}
    rig.inbox.extend([ask(rid, prompt, 9)] for rid, prompt in prompts.items())
    rig.inbox[2].append(ask("one", [1, 2, 3], 1))
    rig.run()
    for rid, prompt in prompts.items():
        assert rig.said(rid) == expected_output(prompt, 9) and rig.finishes(rid) == ["length"]
    assert rig.said("one") == expected_output([1, 2, 3], 1)
    assert rig.step_runner.most_in_flight == (2 if overlap else 1)
    assert isinstance(rig.sent[0], SchedulerStats)


@LOOPS
def test_tier_copies_are_made_and_waited_for(overlap: bool) -> None:
    """While no request can continue before a copy ends, the loop neither sleeps past its end nor spins."""
    rig = Rig(overlap=overlap, host_tokens=2048)
    prompts = [list(range(n, n + 100)) for n in range(0, 900, 100)]
    for turn in range(2):
        rig.inbox.extend([ask(f"{turn}-{n}", prompt, 9)] for n, prompt in enumerate(prompts))
        rig.run()
    for turn in range(2):
        for n, prompt in enumerate(prompts):
            assert rig.said(f"{turn}-{n}") == expected_output(prompt, 9)
    assert rig.tiers is not None and rig.tiers.host.counts.loaded > 300
    assert set(rig.timeouts) == {0.0, event_loop.POLL_S}, "without other work it looks again soon"


@LOOPS
def test_failed_kv_load_fails_its_requests(overlap: bool) -> None:
    rig = Rig(overlap=overlap, host_tokens=2048)
    first = list(range(100))
    rig.inbox.append([ask("first", first, 2)])
    rig.run()
    rig.inbox.extend([ask(f"other-{n}", list(range(n, n + 100)), 2)] for n in range(100, 900, 100))
    rig.run()
    assert rig.tier_io is not None
    rig.tier_io.fails, rig.tier_io.turns = True, 2
    rig.inbox.append([ask("again", first, 20)])
    rig.run()
    error = rig.errors()["again"]
    assert (status_of(error), error.code) == (500, "kv_load_failed") and "send it again" in error.message
    rig.tier_io.fails = False
    rig.inbox.append([ask("third", first, 20)])
    rig.run()
    assert rig.said("third") == expected_output(first, 20)


@LOOPS
def test_a_token_computed_after_the_end_is_not_sent(overlap: bool) -> None:
    prompt = [5, 6, 7]
    output = expected_output(prompt, 8)
    rig = Rig(overlap=overlap)
    rig.inbox.append([ask("a", prompt, 8, stop_token_ids=(output[3],)), ask("b", [9, 9], 8)])
    rig.run()
    assert rig.said("a") == output[: output.index(output[3]) + 1] and rig.finishes("a") == ["stop"]
    assert rig.said("b") == expected_output([9, 9], 8)
    # The name is free at once, and the slots are too.
    rig.inbox.append([ask("a", prompt, 8)])
    rig.run()
    assert rig.said("a")[-8:] == output
    stats = rig.scheduler.stats()
    assert stats.free_tokens + stats.evictable_tokens == stats.total_tokens


@LOOPS
def test_abort_with_step_in_flight(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.inbox.extend([[ask("a", [1, 2], 30), ask("b", [3], 5)], [], [], [AbortRequest(rid="a")]])
    rig.run()
    assert rig.finishes("a") == ["abort"] and rig.said("a") == expected_output([1, 2], 30)[: len(rig.said("a"))]
    assert rig.said("b") == expected_output([3], 5)


@LOOPS
@pytest.mark.parametrize("kind", ["launch", "wait"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_failed_step_ends_only_its_requests(overlap: bool, kind: str, number: int) -> None:
    rig = Rig(overlap=overlap)
    (rig.step_runner.failing_launches if kind == "launch" else rig.step_runner.failing_waits).add(number)
    rig.inbox.append([ask("a", list(range(20))), ask("b", list(range(50, 90)))])
    rig.inbox.extend([[], [], [], [], [ask("late", [7, 8], 4)]])
    rig.run()
    failed = rig.errors()
    assert set(failed) <= {"a", "b"} and failed, "the step had requests"
    assert all(status_of(error) == 500 and "on fire" in error.message for error in failed.values())
    for rid, prompt in {"a": list(range(20)), "b": list(range(50, 90))}.items():
        if rid not in failed:
            assert rig.said(rid) == expected_output(prompt, 6) and rig.finishes(rid) == ["length"]
    assert rig.said("late") == expected_output([7, 8], 4)
    stats = rig.scheduler.stats()
    assert stats.free_tokens + stats.evictable_tokens == stats.total_tokens


@LOOPS
def test_repeated_step_failures_end_the_worker(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.step_runner.failing_launches |= set(range(1, 20))
    rig.inbox.extend([ask(f"r{n}", [n, 1])] for n in range(MAX_FAILED_STEPS))
    with pytest.raises(RuntimeError, match="on fire"):
        rig.run()
    assert len(rig.errors()) == MAX_FAILED_STEPS - 1


@LOOPS
@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_one_end_whatever_fails(overlap: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches and waits fail at random, among requests, continuations, aborts and unknown names."""
    monkeypatch.setattr(event_loop, "MAX_FAILED_STEPS", 10**9)
    rng, rig = random.Random(seed), Rig(overlap=overlap)
    rig.step_runner.failing_launches = {n for n in range(1, 2000) if rng.random() < 0.1}
    rig.step_runner.failing_waits = {n for n in range(1, 2000) if rng.random() < 0.1}
    asked: dict[str, int] = {}
    for number in range(120):
        rid, kind = f"r{number}", rng.random()
        prompt = [rng.randrange(20) for _ in range(rng.randrange(1, 70))]
        messages: list[Any] = []
        if kind < 0.4:
            asked[rid] = rng.choice([1, 1, 3])
            messages.append(ask(rid, prompt, rng.randrange(1, 12), n=asked[rid]))
        elif kind < 0.6 and asked:
            parent, asked[rid] = rng.choice(list(asked)[-6:]), 1
            at: Any = rng.choice(["finish", "now"])
            child = msgspec.structs.replace(ask(rid, prompt[:5], 4), continuation=ContinuationSpec(parent, at=at))
            messages.append(msgspec.structs.replace(child, retain_ttl=1e6))
        elif kind < 0.8:
            messages += [AbortRequest(rid=name) for name in rng.choices([*asked, "nobody"], k=2)]
        messages.append(ReleaseRequest(call_id=number, rid=rng.choice([*asked, "nobody"])))
        rig.inbox.append(messages)
    rig.run()
    errors = Counter(message.rid for message in rig.sent if isinstance(message, RequestError))
    for rid, n in asked.items():
        finished = len(rig.finishes(rid))
        assert (errors[rid] == 0 and finished == n) or (errors[rid] == 1 and finished < n), rid
    assert not set(errors) - set(asked) and any(errors.values())
    assert sum(isinstance(message, ControlReply) for message in rig.sent) == 120
    assert rig.scheduler.is_idle and not rig.loop._outputs._pending and not rig.loop._in_flight
    assert rig.scheduler.stats().leaked_tokens == 0


@LOOPS
def test_an_overdue_request_ends_with_408_and_others_continue(overlap: bool) -> None:
    rig = Rig(overlap=overlap, request_timeout=20.0)
    rig.seconds_per_turn = 1.0
    rig.inbox.append([ask("long", [1, 2, 3], 90), ask("short", [4, 5, 6], 9)])
    rig.run()
    error = rig.errors()["long"]
    assert (status_of(error), error.code) == (408, "request_timeout") and "--request-timeout" in error.message
    assert len(rig.errors()) == 1 and rig.finishes("long") == []
    assert rig.said("short") == expected_output([4, 5, 6], 9)


@LOOPS
def test_pause_launches_no_steps_and_loses_no_requests(overlap: bool) -> None:
    """What is in flight is committed, what comes waits; all else goes on: aborts, leases."""
    rig = Rig(overlap=overlap)
    rig.seconds_per_turn = 1.0
    kept = msgspec.structs.replace(ask("kept", [7, 8, 9], 1), retain_ttl=8.0)
    rig.inbox += [[kept, ask("runs", [1, 2, 3], 9)], [], [], [], [ControlRequest(call_id=1, verb="pause")], [], []]
    rig.inbox += [[ask("new", [4, 5, 6], 3), ask("gone", [4, 5], 3)], [AbortRequest(rid="gone")], *([[]] * 9)]
    launched: list[int] = []
    while rig.inbox:
        rig.loop.turn()
        launched.append(rig.step_runner.launches)
    assert launched[3] == launched[-1] > 2 and not rig.said("new")
    assert rig.finishes("kept") == ["length"] and rig.scheduler.next_lease_deadline is None
    assert rig.finishes("gone") == ["abort"]
    rig.inbox.append([ControlRequest(call_id=2, verb="resume")])
    rig.run()
    assert rig.said("runs") == expected_output([1, 2, 3], 9) and rig.said("new") == expected_output([4, 5, 6], 3)
    assert not rig.errors()


@LOOPS
def test_paused_loop_sleeps_and_times_out_requests(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(overlap=overlap, request_timeout=20.0)
    rig.seconds_per_turn = 0.25
    waits: list[float] = []
    poll = rig.poll
    monkeypatch.setattr(rig, "poll", lambda timeout: waits.append(timeout) or poll(timeout))
    rig.inbox += [[ask("r", [1, 2, 3], 90)], [], [ControlRequest(call_id=1, verb="pause")]]
    rig.run()
    assert rig.errors()["r"].code == "request_timeout"
    # The step in flight is committed at once; then the loop sleeps, until the next heartbeat at most.
    assert waits[1:3] == [0.0, 0.0] and (waits[3] == 0.0) is overlap
    assert all(0.0 <= wait <= HEARTBEAT_S for wait in waits)
    assert sum(wait > 0.0 for wait in waits[4:]) > 40


def test_a_full_queue_is_refused_with_429() -> None:
    rig = Rig(overlap=False, max_queued_requests=1)
    rig.inbox.append([ask("first", [1, 2, 3]), ask("second", [4, 5, 6])])
    rig.run()
    error = rig.errors()["second"]
    assert (status_of(error), error.code) == (429, "queue_full")
    assert rig.finishes("first") == ["length"]


@LOOPS
def test_beam_search_runs_beside_other_requests(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.inbox.append([ask("s", [1, 2, 3], 5, beam_width=3, n=2), ask("r", [4, 5], 12)])
    rig.run()
    assert rig.said("r") == expected_output([4, 5], 12)
    assert rig.finishes("s") == ["length", "length"]


@LOOPS
def test_constrained_requests_and_beams_share_steps(overlap: bool) -> None:
    """A mixed step whose masks wait for the token in flight holds a search's first beams, too."""
    rig = Rig(overlap=overlap, enable_mixed_chunk=True, disable_jump_forward=True)
    items = ItemTrie.build(np.random.default_rng(0).integers(0, 90, (40, 12), dtype=np.int32))
    rig.loop._item_tries.put("items", items)
    rig.inbox.append([ask(f"item{n}", [n, 2, 3], 12, item_trie="items") for n in range(3)])
    rig.inbox.append([ask("plain", [7, 8], 20)])
    for _ in range(3):
        rig.inbox.append([])
    rig.inbox.append([ask("search", [1, 2, 3], 5, beam_width=2, n=2), ask("late", [9, 2, 3], 12, item_trie="items")])
    rig.run()
    for n in (0, 1, 2):
        assert rig.said(f"item{n}") == expected_output([n, 2, 3], 12, trie=items)
    assert rig.said("late") == expected_output([9, 2, 3], 12, trie=items)
    assert rig.said("plain") == expected_output([7, 8], 20) and not rig.errors()
    assert rig.finishes("search") and (rig.step_runner.sampled_late > 4) is overlap


@LOOPS
def test_sampling_that_fails_late_ends_only_its_requests(overlap: bool) -> None:
    rig = Rig(overlap=overlap, disable_jump_forward=True)
    items = ItemTrie.build(np.random.default_rng(0).integers(0, 90, (40, 12), dtype=np.int32))
    rig.loop._item_tries.put("items", items)
    rig.step_runner.failing_samples = {3}
    rig.inbox.append([ask("item", [1, 2, 3], 12, item_trie="items")])
    rig.inbox.extend([[] for _ in range(40)])
    rig.inbox.append([ask("after", [1, 2, 3], 12, item_trie="items")])
    rig.run()
    assert ("item" in rig.errors()) is overlap, "without overlap nothing is sampled late"
    assert rig.said("after") == expected_output([1, 2, 3], 12, trie=items)


@LOOPS
def test_steps_are_profiled_between_start_and_stop(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.inbox.append([ControlRequest(call_id=1, verb="stop_profile")])
    rig.inbox.append([ControlRequest(call_id=2, verb="start_profile"), ControlRequest(call_id=3, verb="start_profile")])
    rig.inbox.append([ask("a", [1, 2, 3], 5), ask("b", [4, 5], 5)])
    rig.run()
    rig.inbox.append([ControlRequest(call_id=4, verb="stop_profile")])
    rig.run()
    replies = {message.call_id: message for message in rig.sent if isinstance(message, ControlReply)}
    assert [replies[i].ok for i in (1, 2, 3, 4)] == [False, True, False, True]
    profile = msgspec.json.decode(replies[4].payload)
    assert profile["steps"] == rig.step_runner.launches and profile["kinds"]["extend"]["steps"] == 1
    decode = profile["kinds"]["decode"]
    assert decode["rows"] == {"min": 2, "median": 2.0, "max": 2}
    laps = [times["total"] for times in decode["phases_ms"].values()]
    assert sum(laps) == pytest.approx(decode["step_ms"]["total"]) and decode["phases_ms"]["schedule"]["median"] > 0


@LOOPS
def test_cpu_threads_are_checked_before_each_step_only(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    rig.seconds_per_turn = 1.0
    rig.inbox.extend([[], [], [ask("a", [1, 2, 3], 5)]])
    rig.run()
    launches = rig.step_runner.launches
    assert [steps for _, steps, _ in rig.watched] == list(range(launches))
    assert rig.watched[0][0] == 3.0, "the time of the turn"
    rig.inbox.extend([[], [], [ask("b", [1, 2, 3], 5)]])
    rig.run()
    assert not any(after for _, _, after in rig.watched), "a pause alone is no idle work"
    rig.loop._idle_work = lambda: 0.0
    launches = rig.step_runner.launches
    rig.inbox.extend([[], [], [], [ask("c", [1, 2, 3], 5)]])
    rig.run()
    assert [steps for _, steps, after in rig.watched if after] == [launches], "the first step after it alone"


@LOOPS
def test_messages_are_delivered_before_a_step_and_at_the_end_of_a_turn(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(overlap=overlap)
    forward, turn, held = rig.step_runner.model.forward, rig.loop.turn, []

    def computes(batch: ScheduleBatch) -> Any:
        held.append(len(rig.held))
        return forward(batch)

    def turns() -> None:
        turn()
        held.append(len(rig.held))

    monkeypatch.setattr(rig.step_runner.model, "forward", computes)
    monkeypatch.setattr(rig.loop, "turn", turns)
    rig.step_runner.failing_launches.add(2)
    rig.inbox.extend([[ask("a", [1, 2, 3], 5)], [], [AbortRequest(rid="a")], [], [ask("b", [1], 5)]])
    rig.run()
    assert rig.finishes("b") == ["length"] and not any(held) and len(held) > rig.step_runner.launches


@LOOPS
def test_one_turn_uses_one_timestamp(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves on with every look at it; all that a turn decides, it decides at one time."""
    rig = Rig(overlap=overlap)
    seen: list[float] = []

    def clock() -> float:
        rig.now += 1.0
        return rig.now

    def spy(name: str, place: int) -> None:
        method = getattr(Scheduler, name)

        def called(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
            seen.append(args[place])
            return method(self, *args, **kwargs)

        monkeypatch.setattr(Scheduler, name, called)

    for name, place in {
        "add_request": 1,
        "abort_request": 1,
        "next_batch": 0,
        "process_result": 1,
        "fail_step": 0,
        "self_check": 0,
    }.items():
        spy(name, place)
    rig.loop._clock = clock
    rig.step_runner.failing_waits.add(2)
    rig.inbox.extend([[ask("a", [1, 2], 9), ask("b", [3], 5)], [], [AbortRequest(rid="a")], [ask("c", [4, 4], 5)]])
    times: list[float] = []
    while not rig.stop.is_set():
        seen.clear()
        rig.loop.turn()
        assert len(set(seen)) == 1, "next_batch at least is asked in every turn"
        times.append(seen[0])
    assert times == sorted(set(times)) and len(times) > 8
    assert rig.said("c") == expected_output([4, 4], 5)


def test_idle_work_runs_without_open_requests_until_done() -> None:
    rig, left, done_at = Rig(overlap=True), [3], []

    def work() -> float | None:
        assert rig.scheduler.is_idle
        done_at.append(rig.now)
        left[0] -= 1
        return 0.0 if left[0] > 0 else None

    rig.loop._idle_work = work

    def turn(now: float) -> None:
        rig.now = now
        rig.loop.turn()

    rig.inbox.append([ask("a", [1, 2, 3])])
    for now in range(12):  # the request takes a few of these turns
        turn(0.1 * now)
    last = rig.loop._idle_since
    assert not done_at and 0.3 < last < 1.2
    assert rig.loop.seconds_to_sleep() <= last + IDLE_WORK_S - rig.now
    turn(last + IDLE_WORK_S - 0.01)
    assert not done_at, "a second must have passed"
    turn(last + IDLE_WORK_S)
    assert len(done_at) == 1 and rig.loop.seconds_to_sleep() == 0.0, "the next piece follows at once"
    rig.inbox.append([ask("b", [4, 5, 6])])
    turn(last + 2 * IDLE_WORK_S)
    turn(last + 2 * IDLE_WORK_S + 0.5)
    assert len(done_at) == 1, "a request interrupts it"
    for later in range(20):
        turn(last + 9 + 2 * later)
    assert len(done_at) == 3, "it has ended"
    assert rig.finishes("a") == rig.finishes("b") == ["length"]


def test_idle_work_may_ask_for_a_wait() -> None:
    rig, done_at = Rig(overlap=False), []

    def work() -> float | None:
        done_at.append(rig.now)
        return 30.0 if len(done_at) == 1 else None

    rig.loop._idle_work = work
    start = rig.loop._idle_since
    for later in range(1, 40):
        rig.now = start + later
        rig.loop.turn()
        if later == 5:
            rig.loop._next_heartbeat = math.inf
            assert rig.loop.seconds_to_sleep() == start + IDLE_WORK_S + 30.0 - rig.now, "it does not spin"
            rig.loop._next_heartbeat = 0.0
    assert done_at == [start + IDLE_WORK_S, start + IDLE_WORK_S + 30.0]


def test_idle_work_waits_while_the_worker_is_paused() -> None:
    rig = Rig(overlap=False)
    rig.loop._idle_work = lambda: pytest.fail("worked")
    rig.loop._control.paused = True
    for now in range(5):
        rig.now = 10.0 * now
        rig.loop.turn()
    assert rig.loop.seconds_to_sleep() > 0
