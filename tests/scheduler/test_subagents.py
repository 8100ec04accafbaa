"""Jobs with a parent: a subagent is served in its parent's place, and its parent's KV stays pinned meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from baton.radix.lease import Lease
from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.jobs.family import MAX_CHILDREN, MAX_GENERATIONS, ancestors
from baton.scheduler.jobs.job import Job
from baton.scheduler.jobs.job_table import MAX_IDLE_S
from baton.scheduler.policies.job_policies import MAX_PIN_S
from baton.scheduler.policies.registry import PINNING
from tests.doubles.kv_echo import expected_output
from tests.doubles.scheduler_harness import PAGES, Harness

TASK = (ToolCall("Task", "Find it"),)
LS = (ToolCall("ls", "ls -l"),)


def harness(**more: Any) -> Harness:
    """Pins last 2 s: the fill time, as nothing is known of the tools."""
    flags = {"policy": "handoff", "num_tokens": 2048, "leases": 16, "rows": 4, "lease_protection": 2.0}
    scene = Harness(**{**flags, **more})
    scene.turn_s = 0.01
    return scene


def prompt(number: int, length: int = 70) -> list[int]:
    return list(range(1000 * number + 1, 1000 * number + length + 1))


def turn(scene: Harness, rid: str, ids: list[int], job: str, *, calls: Any = LS, **more: Any) -> list[int]:
    """A step to its end, with the calls that its text has. Returns prompt and output."""
    scene.add(rid, ids, 4, job_id=job, **more)
    scene.run()
    assert scene.outcomes[rid, 0].tokens == expected_output(ids, 4, frozenset())
    if calls is not None and not more.get("is_last_step"):
        scene.scheduler.record_tool_calls(rid, 0, calls, scene.now)
    return ids + scene.outcomes[rid, 0].tokens


def job(scene: Harness, name: str) -> Job:
    found = scene.scheduler._pins._table.get_job("", name)
    assert found is not None
    return found


def pin(scene: Harness, rid: str) -> Lease | None:
    """The live lease of a step."""
    return next((lease for lease, (name, _) in scene.scheduler.named_leases().items() if name == rid), None)


def wait(scene: Harness, seconds: float) -> None:
    scene.now += seconds
    scene.scheduler.next_batch(scene.now)
    scene.verify()


def path(scene: Harness, rid: str) -> str | None:
    request = scene.outcomes[rid, 0].request
    assert request is not None
    return request.inheritance.path if request.inheritance is not None else None


def test_child_is_served_in_its_parents_place() -> None:
    scene = harness(rows=1)
    turn(scene, "plan", prompt(1), "parent", calls=TASK)
    turn(scene, "other", prompt(2), "other")
    scene.add("busy", prompt(3), 20, job_id="busy")
    scene.step()
    for number, (rid, name, parent) in enumerate(
        [("late", "late", None), ("other 2", "other", None), ("child", "child", "parent"), ("stray", "stray", "no one")]
    ):
        scene.add(rid, prompt(10 + number), 4, job_id=name, parent_job_id=parent)
    scene.run()
    firsts = {rid: outcome.request.serial for (rid, _), outcome in scene.outcomes.items() if outcome.request}
    assert firsts["late"] < firsts["other 2"] < firsts["child"]
    child, parent = job(scene, "child"), job(scene, "parent")
    assert child.parent is parent and (child.arrival, child.serial) == (parent.arrival, parent.serial)
    assert job(scene, "stray").parent is None


@pytest.mark.parametrize("policy", PINNING)
def test_order_of_waiting_children(policy: str) -> None:
    scene = harness(policy=policy, rows=1)
    turn(scene, "plan", prompt(1), "parent", calls=TASK)
    turn(scene, "other", prompt(2), "other")
    for lease in scene.scheduler.live_leases():
        scene.scheduler._leases.release(lease)
    scene.add("busy", prompt(3), 20, job_id="busy")
    scene.step()
    for number, (name, parent) in enumerate([("new", None), ("other", None), ("child", "parent")]):
        scene.add(f"{name} waits", prompt(10 + number), 4, job_id=name, parent_job_id=parent)
    order = scene.scheduler._policy.order(list(scene.scheduler._waiting.requests), scene.now)
    assert [request.rid for request in order] == ["child waits", "other waits", "new waits"]
    scene.run()


@PAGES
def test_parents_pin_outlasts_its_child(page_size: int) -> None:
    scene = harness(page_size=page_size)
    said = turn(scene, "plan", prompt(1), "parent", calls=TASK)
    task, step = prompt(2), 0
    for step in range(5):
        task = [*turn(scene, f"step {step}", task, "child", parent_job_id="parent"), 7, 7]
        wait(scene, 1.5)
        assert pin(scene, "plan") is not None, "its own would have expired after two seconds"
        child = pin(scene, f"step {step}")
        assert child is not None and pin(scene, "plan").deadline >= child.deadline  # type: ignore[union-attr]
    turn(scene, "answer", task, "child", calls=())
    wait(scene, 0.5)
    turn(scene, "back", [*said, 8], "parent")
    assert path(scene, "back") == "handoff"
    scene.scheduler.end_job("", "parent", scene.now)
    scene.scheduler.end_job("", "child", scene.now)
    assert not scene.scheduler.live_leases()


def test_pin_is_held_while_a_child_computes() -> None:
    scene = harness()
    turn(scene, "plan", prompt(1), "parent", calls=TASK)
    scene.add("long", prompt(2), 100, job_id="child", parent_job_id="parent")
    scene.turn_s = 2.0
    for _ in range(60):
        scene.step()
    assert pin(scene, "plan") is not None and scene.outcomes["long", 0].finish is None
    pushed = len(scene.scheduler._leases.deadlines)
    for number in range(20):
        scene.add(f"more {number}", prompt(3 + number, 5), 2, job_id=f"child {number}", parent_job_id="parent")
    assert len(scene.scheduler._leases.deadlines) == pushed, "not every event moves the deadline"
    scene.run()


@pytest.mark.parametrize("how", ["last step", "ended", "aborted", "failed", "answered"])
def test_end_of_the_child_lets_the_parent_go(how: str) -> None:
    scene = harness()
    turn(scene, "plan", prompt(1), "parent", calls=TASK)
    turn(scene, "step", prompt(2), "child", parent_job_id="parent", retain_ttl=50.0)
    wait(scene, 5.0)
    held = pin(scene, "plan")
    assert held is not None and held.deadline > scene.now + 40
    if how == "last step":
        turn(scene, "last", prompt(3), "child", is_last_step=True)
    elif how == "ended":
        scene.scheduler.end_job("", "child", scene.now)
    elif how == "answered":
        scene.scheduler.release_leases("step")
        turn(scene, "last", prompt(3), "child", calls=())
    else:
        scene.scheduler.release_leases("step")
        scene.add("last", prompt(3), 50, job_id="child")
        scene.step()
        assert held.deadline > scene.now + MAX_PIN_S / 2
        if how == "aborted":
            scene.abort("last")
        else:
            scene.fault = lambda batch: "compute"
            scene.run()
            scene.fault = lambda batch: None
    scene.step()
    if how != "ended":
        assert pin(scene, "plan") is not None, "its parent is about to return"
    wait(scene, 12.0)
    assert pin(scene, "plan") is None


def test_held_pins_break_under_pressure() -> None:
    scene = harness(num_tokens=256, leases=4, lease_protection=5.0)
    turn(scene, "plan", prompt(1), "parent", calls=TASK)
    scene.add("child", prompt(2, 40), 60, job_id="child", parent_job_id="parent")
    scene.step()
    held = pin(scene, "plan")
    assert held is not None
    # A newcomer waits for it for no longer than for any other idle lease.
    scene.add("large", prompt(3, 120), 4)
    for _ in range(5):
        scene.step()
    assert pin(scene, "plan") is not None
    scene.turn_s = 1.0
    scene.run()
    assert scene.outcomes["large", 0].tokens == expected_output(prompt(3, 120), 4, frozenset())
    assert not held.is_live and scene.scheduler.stats().jobs.broken == 1


def test_parent_alone_holds_nobody_up() -> None:
    """Every lease is a parent's, held for a child that waits: the child runs."""
    scene = harness(num_tokens=256, leases=4, leased_ratio=1.0)
    for number in range(3):
        turn(scene, f"plan {number}", prompt(number), f"parent {number}", calls=TASK)
    for number in range(3):
        scene.add(
            f"child {number}", prompt(10 + number, 200), 4, job_id=f"child {number}", parent_job_id=f"parent {number}"
        )
    scene.run()
    assert all(outcome.finish is not None and not outcome.refusal for outcome in scene.outcomes.values())


def test_policies_without_pins_hold_nothing() -> None:
    scene = harness(policy="fcfs")
    turn(scene, "plan", prompt(1), "parent", calls=TASK, retain_ttl=3.0)
    turn(scene, "step", prompt(2), "child", parent_job_id="parent", retain_ttl=50.0)
    wait(scene, 4.0)
    assert pin(scene, "plan") is None and pin(scene, "step") is not None


def test_grandparent_is_held_for_its_grandchild() -> None:
    scene = harness()
    turn(scene, "plan", prompt(1), "top", calls=TASK)
    turn(scene, "part", prompt(2), "middle", calls=TASK, parent_job_id="top")
    task = prompt(3)
    for step in range(4):
        task = [*turn(scene, f"step {step}", task, "leaf", parent_job_id="middle"), 7]
        wait(scene, 1.5)
    assert pin(scene, "plan") is not None and pin(scene, "part") is not None
    scene.scheduler.end_job("", "leaf", scene.now)
    wait(scene, 2.0)
    wait(scene, 0.1)
    assert not scene.scheduler.live_leases()


def test_cycles_and_long_chains_of_parents_are_harmless() -> None:
    scene = harness(leases=120, rows=8, num_tokens=16_384)
    for number in range(100):
        turn(scene, f"step {number}", prompt(number, 10), f"job {number}", parent_job_id=f"job {number - 1}")
    last = job(scene, "job 99")
    assert (last.arrival, last.serial) == (job(scene, "job 0").arrival, job(scene, "job 0").serial)
    assert len(list(ancestors(last))) == MAX_GENERATIONS
    for name, parent in (("job 0", "job 99"), ("job 95", "job 99"), ("job 99", "job 99"), ("self", "self")):
        turn(scene, f"{name} again", prompt(200, 10), name, parent_job_id=parent)
    assert job(scene, "job 95").parent is job(scene, "job 94") and job(scene, "self").parent is None
    for name in [f"job {number}" for number in range(0, 100, 2)]:
        scene.scheduler.end_job("", name, scene.now)
    wait(scene, MAX_PIN_S)
    assert not scene.scheduler.live_leases()


def test_two_jobs_that_name_each_other_are_parent_and_child_once() -> None:
    scene = harness()
    turn(scene, "a", prompt(1), "one", parent_job_id="two")
    turn(scene, "b", prompt(2), "two", parent_job_id="one")
    turn(scene, "c", prompt(3), "one", parent_job_id="two")
    assert job(scene, "one").parent is None and job(scene, "two").parent is job(scene, "one")


def test_ended_and_unknown_jobs_are_no_parents() -> None:
    scene = harness()
    turn(scene, "plan", prompt(1), "parent", is_last_step=True)
    turn(scene, "a", prompt(2), "child", parent_job_id="parent")
    turn(scene, "b", prompt(3), "other", parent_job_id="parent", namespace="salt")
    assert job(scene, "child").parent is None
    described = scene.scheduler.describe_jobs("", "child", scene.now)
    assert described[0]["parent_job_id"] is None
    turn(scene, "c", prompt(4), "parent")
    turn(scene, "d", prompt(2), "child", parent_job_id="parent")
    described = scene.scheduler.describe_jobs("", "child", scene.now)
    assert described[0]["parent_job_id"] == "parent", "it has begun anew"
    assert described[0]["age_s"] > scene.scheduler.describe_jobs("", "parent", scene.now)[0]["age_s"]


@pytest.mark.parametrize("how", ["last step", "ended", "silent"])
@pytest.mark.parametrize("idle", [False, True], ids=["active", "idle"])
def test_parent_that_has_begun_anew_is_held_for_its_children(how: str, idle: bool) -> None:
    """Also for those of them that it needed no more when it was looked at last."""
    scene = harness()
    turn(scene, "plan", prompt(1), "parent", calls=TASK)
    turn(scene, "step", prompt(2), "child", parent_job_id="parent")
    if idle:
        wait(scene, 10.0)
        turn(scene, "goes on", prompt(3), "parent", calls=TASK)
        assert not job(scene, "parent").children
    first = job(scene, "parent")
    if how == "last step":
        turn(scene, "last", prompt(4), "parent", is_last_step=True)
    elif how == "ended":
        scene.scheduler.end_job("", "parent", scene.now)
    else:
        wait(scene, MAX_IDLE_S + 1)
    turn(scene, "anew", prompt(5), "parent", calls=TASK)
    assert job(scene, "parent") is not first and job(scene, "child").parent is None, "nothing keeps the old one"
    scene.add("works", prompt(6), 100, job_id="child", parent_job_id="parent")
    scene.turn_s = 2.0
    for _ in range(20):
        scene.step()
    assert scene.outcomes["works", 0].finish is None and job(scene, "child").parent is job(scene, "parent")
    assert pin(scene, "anew") is not None, "its own would have expired after two seconds"


def test_child_of_a_job_that_is_over_may_get_another_parent() -> None:
    scene = harness()
    turn(scene, "plan", prompt(1), "one", calls=TASK)
    turn(scene, "step", prompt(2), "child", parent_job_id="one")
    turn(scene, "other plan", prompt(3), "two", calls=TASK)
    turn(scene, "step 2", prompt(2), "child", parent_job_id="two")
    assert job(scene, "child").parent is job(scene, "one"), "which is not over"
    turn(scene, "last", prompt(4), "one", is_last_step=True)
    turn(scene, "step 3", prompt(2), "child", parent_job_id="two")
    child = job(scene, "child")
    assert child.parent is job(scene, "two") and child in job(scene, "two").children
    assert not job(scene, "one").children and not job(scene, "one").adopted


def test_jobs_that_are_forgotten_are_not_kept_by_their_family() -> None:
    scene = harness(max_jobs=4, check=False)
    for number in range(30):
        turn(scene, f"step {number}", prompt(number, 10), f"job {number}", parent_job_id=f"job {number - 1}")
    newest = job(scene, "job 29")
    known, step = 0, newest
    while step.parent is not None:
        known, step = known + 1, step.parent
    assert known < 4 and step.adopted.keys() >= step.children.keys()
    assert step.adopted.keys() <= {job(scene, f"job {number}") for number in range(26, 30)}


def test_parent_of_many_children_watches_the_last_active_ones() -> None:
    scene = harness(max_jobs=500, leases=4)
    turn(scene, "plan", prompt(1), "parent", calls=TASK)
    for number in range(MAX_CHILDREN + 20):
        scene.add(f"child {number}", prompt(2, 5), 2, job_id=f"child {number}", parent_job_id="parent")
    assert len(job(scene, "parent").children) == MAX_CHILDREN
    scene.run()
    wait(scene, 100.0)
    turn(scene, "back", prompt(3), "parent")
    assert not job(scene, "parent").children


def test_tool_time_of_the_parent_is_that_of_its_call() -> None:
    scene = harness()
    said = turn(scene, "plan", prompt(1), "parent", calls=TASK)
    began = scene.now
    turn(scene, "step", prompt(2), "child", parent_job_id="parent", calls=())
    scene.now += 3.0
    took = scene.now - began
    turn(scene, "back", [*said, 8], "parent")
    assert scene.scheduler._pins.times.history.durations_of("Task").tolist() == pytest.approx([took], abs=0.1)
