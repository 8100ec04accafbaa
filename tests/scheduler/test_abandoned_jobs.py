"""Jobs that do not come back: what is learned of their tools, once, and bounded."""

from __future__ import annotations

import pytest

from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.policies.job_policies import MAX_PIN_S
from tests.doubles.scheduler_harness import Harness

BASH = (ToolCall("train", "train all"),)
PROMPT = list(range(1, 70))


@pytest.fixture
def scene() -> Harness:
    scene = Harness(policy="handoff", num_tokens=1024)
    scene.turn_s = 0.01
    return scene


def turn(scene: Harness, rid: str, job: str = "job", **more) -> None:
    """A step of a job, to its end, and what it called."""
    scene.add(rid, PROMPT, 4, job_id=job, **more)
    scene.run()
    scene.scheduler.record_tool_calls(rid, 0, BASH, scene.now)


def learned(scene: Harness) -> list[float]:
    return scene.scheduler._pins.times.history.durations_of("train").tolist()


def pass_time(scene: Harness, seconds: float) -> None:
    scene.now += seconds
    scene.step()


def test_abandoned_job_counts_as_longest_pin(scene: Harness) -> None:
    turn(scene, "a")
    pass_time(scene, MAX_PIN_S - 1)
    assert learned(scene) == []
    pass_time(scene, 2.0)
    assert learned(scene) == [MAX_PIN_S]
    pass_time(scene, 2 * MAX_PIN_S)
    assert learned(scene) == [MAX_PIN_S]


def test_job_returning_late_counts_as_abandoned_once(scene: Harness) -> None:
    turn(scene, "a")
    pass_time(scene, MAX_PIN_S + 1)
    turn(scene, "b")
    assert learned(scene) == [MAX_PIN_S]
    pass_time(scene, 3.0)
    turn(scene, "c")
    assert learned(scene) == [pytest.approx(3.0, abs=0.5), MAX_PIN_S]


def test_ended_job_records_no_tool_time(scene: Harness) -> None:
    turn(scene, "a", job="deleted")
    scene.scheduler._pins.end_job("", "deleted")
    turn(scene, "b", job="over", is_last_step=True)
    scene.add("c", PROMPT, 4, job_id="running")
    scene.step()
    scene.scheduler._pins.end_job("", "running")  # its request goes on without it, and ends later
    scene.run()
    assert not scene.scheduler._pins._table._away
    pass_time(scene, MAX_PIN_S + 1)
    assert learned(scene) == []


def test_tool_without_returns_is_not_pinned(scene: Harness) -> None:
    for number in range(8):
        turn(scene, f"a{number}", job=f"job{number}")
    pass_time(scene, MAX_PIN_S + 1)
    turn(scene, "last", job="last")
    pass_time(scene, 0.1)
    assert not any(lease.is_live for lease in scene.scheduler.live_leases())


def test_forgotten_jobs_are_not_awaited() -> None:
    scene = Harness(policy="handoff", num_tokens=1024, max_jobs=4)
    for number in range(12):
        turn(scene, f"a{number}", job=f"job{number}")
    assert len(scene.scheduler._pins._table._away) == 4
