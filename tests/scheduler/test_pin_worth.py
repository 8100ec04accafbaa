"""What a finished turn is worth, and until when its job is expected back: whose lease gives way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from baton.radix.lease import Lease
from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.jobs.kept_turn import KeptTurn, Worth
from baton.scheduler.policies.registry import POLICIES
from tests.doubles.kv_echo import expected_output
from tests.doubles.scheduler_harness import PAGES, Harness

LS = (ToolCall("ls", "ls -l"),)


def harness(**more: Any) -> Harness:
    scene = Harness(**{"num_tokens": 1024, "leases": 4, **more})
    scene.turn_s = 0.01
    return scene


def prompt(number: int, length: int = 70) -> list[int]:
    return list(range(1000 * number + 1, 1000 * number + length + 1))


def chat(scene: Harness, rid: str, ids: list[int], *, job: str | None = None, **more: Any) -> list[int]:
    """A turn of a plain chat, to its end; its job is named after the first. Returns prompt and output."""
    fields = {"retain_ttl": 60.0, "unasked": True, **more}
    scene.add(rid, ids, 4, job_id=job or f"chat-{rid}", **fields)
    scene.run()
    assert scene.outcomes[rid, 0].tokens == expected_output(ids, 4, frozenset())
    return ids + scene.outcomes[rid, 0].tokens


def leases(scene: Harness) -> dict[str, Lease]:
    """Live ones, by the rid of their turn."""
    return {rid: lease for lease, (rid, _) in scene.scheduler.named_leases().items()}


def worth(scene: Harness, rid: str) -> Worth:
    kept = leases(scene)[rid].owner
    assert isinstance(kept, KeptTurn)
    return kept.worth


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_turn_worth_follows_requests_and_returns(policy: str) -> None:
    scene = harness(policy=policy)
    said = chat(scene, "first", prompt(1))
    assert worth(scene, "first") is Worth.FIRST_TURN
    chat(scene, "back", [*said, 7, 8], job="chat-first")
    assert worth(scene, "back") is Worth.RETURNED and "first" not in leases(scene), "it took the lease over"
    chat(scene, "named", prompt(2), job="mine", unasked=False)
    assert worth(scene, "named") is Worth.ASKED_FOR
    chat(scene, "elsewhere", prompt(3), job="mine", unasked=False)
    assert worth(scene, "elsewhere") is Worth.RETURNED, "the job came back, though not to what it had said"


def test_turn_with_waiting_child_counts_as_returned() -> None:
    scene = harness()
    scene.add("parent", prompt(1), 4)
    scene.continue_from("parent", "child", [5, 6])
    while scene.outcomes["parent", 0].finish is None:
        scene.step()
    assert worth(scene, "parent") is Worth.RETURNED
    scene.run()


@PAGES
def test_first_turns_neither_displace_nor_outlast_returned_ones(page_size: int) -> None:
    """There is room for four leases."""
    scene = harness(page_size=page_size)
    said = chat(scene, "a", prompt(1))
    chat(scene, "b", [*said, 7, 8], job="chat-a")
    for number in range(2, 12):
        chat(scene, f"one{number}", prompt(number))
    assert {*leases(scene)} == {"b", "one9", "one10", "one11"}
    for number in range(12, 16):
        first = chat(scene, f"c{number}", prompt(number))
        chat(scene, f"d{number}", [*first, 7, 8], job=f"chat-c{number}")
    assert {*leases(scene)} == {"d12", "d13", "d14", "d15"}, "of equal worth the longest idle one gives way"
    chat(scene, "new", prompt(20))
    retained = scene.outcomes["new", 0].request
    assert "new" not in leases(scene) and retained is not None and retained.retained is not None
    assert retained.retained.refused


@pytest.mark.parametrize("calls", [LS, ()])
def test_turn_breaks_no_lease_of_an_expected_job_before_its_calls_are_known(calls: tuple[ToolCall, ...]) -> None:
    """There is room for four leases, and the oldest job's turn ends last."""
    scene = harness(policy="handoff", pin_time="fixed", pin_seconds=50.0)
    record = scene.scheduler.record_tool_calls
    first = chat(scene, "oldest", prompt(9), job="oldest", unasked=False)
    record("oldest", 0, LS, scene.now)
    for number in range(1, 5):
        said = chat(scene, f"a{number}", prompt(number), job=f"job {number}", unasked=False)
        record(f"a{number}", 0, LS, scene.now)
        chat(scene, f"b{number}", [*said, 7, 8], job=f"job {number}", unasked=False)
        record(f"b{number}", 0, LS, scene.now)
    others = {f"b{number}" for number in range(1, 5)}
    assert {*leases(scene)} == others, "what has returned is worth more"
    chat(scene, "back", [*first, 7, 8], job="oldest", unasked=False)
    assert {*leases(scene)} == others, "the answer may be the last"
    record("back", 0, calls, scene.now)
    assert {*leases(scene)} == ({"b1", "b2", "b3", "back"} if calls else others), (
        "of equal worth the newest job gives way"
    )


def test_job_is_expected_back_only_while_its_tool_runs() -> None:
    scene = harness(policy="handoff", pin_time="fixed", pin_seconds=2.0)
    pins, table = scene.scheduler._pins, scene.scheduler._leases
    rids = ("tool", "person", "later")
    for number, rid in enumerate(rids):
        chat(scene, rid, prompt(number + 1), job=f"job {rid}", unasked=False)
        pins.record_calls(rid, 0, () if rid == "person" else LS, scene.now)
    owners = {rid: lease.owner for rid, lease in leases(scene).items()}
    until = {rid: kept.expected_until for rid, kept in owners.items() if isinstance(kept, KeptTurn)}
    assert until["person"] == -math.inf and scene.now < until["tool"] < until["later"] <= scene.now + 2.0
    by_name = {lease: rid for rid, lease in leases(scene).items()}

    def next_to_break() -> str:
        first = table.least_valuable(scene.now)
        assert first is not None
        return by_name[first]

    assert next_to_break() == "person", "the others' tools run"
    table.release(leases(scene)["person"])
    assert next_to_break() == "later", "of jobs that are expected the newest gives way"
    scene.now = until["tool"] + 0.01
    pins.settle_pins(scene.now)
    assert next_to_break() == "tool", "it has not come back in time, the other still may"
    scene.now += 1.0
    pins.settle_pins(scene.now)
    assert next_to_break() == "tool", "both are late; this one for longer"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_lease_of_first_turn_breaks_for_newcomer(policy: str) -> None:
    """It is young, and worth a lease as long as nobody needs the room."""
    scene = harness(policy=policy, num_tokens=256, lease_protection=100.0)
    chat(scene, "first", prompt(1, 100))
    scene.scheduler.record_tool_calls("first", 0, (), scene.now)
    scene.add("runs", prompt(2, 60), 50)
    scene.step()
    scene.add("comes", prompt(3, 60), 4)
    while scene.outcomes["comes", 0].finish is None:
        scene.step()
    assert scene.outcomes["runs", 0].finish is None, "it was let in while the other ran"
    assert "first" not in leases(scene)
    scene.run()


def busy_with_idle_conversations(page_size: int = 1, **more: Any) -> Harness:
    """Its four leases are those of conversations that have returned, and now wait for their users."""
    scene = harness(policy="handoff", page_size=page_size, pin_time="fixed", pin_seconds=60.0, **more)
    for number in range(1, 5):
        said = chat(scene, f"c{number}", prompt(number))
        chat(scene, f"d{number}", [*said, 7, 8], job=f"chat-c{number}")
        scene.scheduler.record_tool_calls(f"d{number}", 0, (), scene.now)
    assert {*leases(scene)} == {"d1", "d2", "d3", "d4"}
    return scene


@PAGES
def test_first_turn_refused_a_lease_gets_one_for_its_tool(page_size: int) -> None:
    """At its end it looks like any one-shot chat; once its call is known, its result is likelier than a user's word."""
    scene = busy_with_idle_conversations(page_size)
    said = chat(scene, "new", prompt(20))
    assert "new" not in leases(scene)
    scene.scheduler.record_tool_calls("new", 0, LS, scene.now)
    assert {*leases(scene)} == {"d2", "d3", "d4", "new"}, "the longest idle one gave way"
    assert leases(scene)["new"].tokens >= len(said) - 1 - page_size
    for number in range(30, 40):
        chat(scene, f"one{number}", prompt(number))
    assert "new" in leases(scene)
    chat(scene, "back", [*said, 7, 8], job="chat-new")
    request = scene.outcomes["back", 0].request
    assert request is not None and request.inheritance is not None and request.inheritance.path == "handoff"


def test_turn_refused_a_lease_gets_none_without_a_tool_to_expect() -> None:
    """It called nothing; its tool takes too long to wait for; its job is back, or over."""
    scene = busy_with_idle_conversations()
    chat(scene, "silent", prompt(20))
    scene.scheduler.record_tool_calls("silent", 0, (), scene.now)
    chat(scene, "late", prompt(21))
    scene.now += 61.0
    scene.scheduler.record_tool_calls("late", 0, LS, scene.now)
    said = chat(scene, "quick", prompt(22))
    scene.add("child", [*said, 7, 8], 4, job_id="chat-quick", retain_ttl=60.0, unasked=True)
    scene.scheduler.record_tool_calls("quick", 0, LS, scene.now)
    scene.run()
    chat(scene, "last", prompt(23), is_last_step=True)
    scene.scheduler.record_tool_calls("last", 0, LS, scene.now)
    assert not leases(scene).keys() & {"silent", "late", "quick", "last"}


def test_first_turn_is_protected_while_its_tool_runs() -> None:
    """Newcomers wait for it as for a named job's."""
    scene = harness(policy="handoff", num_tokens=256, lease_protection=100.0, pin_time="fixed", pin_seconds=50.0)
    chat(scene, "first", prompt(1, 100))
    scene.scheduler.record_tool_calls("first", 0, LS, scene.now)
    scene.add("runs", prompt(2, 60), 50)
    scene.step()
    scene.add("comes", prompt(3, 60), 4)
    while scene.outcomes["runs", 0].finish is None:
        scene.step()
    assert "first" in leases(scene)
    scene.run()


def test_retracted_turn_keeps_its_worth() -> None:
    scene = harness(num_tokens=190)
    said = chat(scene, "a", prompt(1, 60))
    scene.add("b", [*said, 7, 8], 40, job_id="chat-a", retain_ttl=60.0, unasked=True)
    scene.add("other", prompt(2, 60), 40, unasked=True)
    scene.run()
    requests = {rid: outcome.request for (rid, _), outcome in scene.outcomes.items() if outcome.request is not None}
    assert sum(request.retractions for request in requests.values()) > 0
    assert requests["b"].worth is Worth.RETURNED and requests["other"].worth is Worth.FIRST_TURN


@PAGES
def test_remains_of_first_turn_are_evicted_before_returned_ones(page_size: int) -> None:
    """Both have lost their leases; the first turn is the younger one."""
    scene = harness(page_size=page_size, num_tokens=1024, leased_ratio=1.0)
    said = chat(scene, "a", prompt(1, 180))
    back = chat(scene, "b", [*said, 7, 8], job="chat-a")
    other = chat(scene, "one", prompt(2, 190))
    memory, cache = scene.scheduler._memory, scene.cache
    memory.reclaim(memory.available_tokens + page_size, scene.now)
    assert {*leases(scene)} == {"b"}, "its lease had to break, and is the only one that did"
    left = cache.match_len("", np.array(other, dtype=np.int32))
    assert 0 < left < len(other)
    scene.scheduler.release_leases("b")
    memory.reclaim(scene.allocator.free_tokens + left // 2, scene.now)
    assert cache.match_len("", np.array(other, dtype=np.int32)) < left
    assert cache.match_len("", np.array(back, dtype=np.int32)) >= len(back) - len(back) % page_size - page_size
