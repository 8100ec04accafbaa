"""Jobs: what is pinned between their steps, who takes it over, and when it is given up."""

from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.policies.registry import PINNING
from tests.doubles.kv_echo import expected_output
from tests.doubles.scheduler_harness import PAGES, Harness

BASH = (ToolCall("ls", "ls -l"),)
PROMPT = list(range(1, 70))


def harness(**more) -> Harness:
    scene = Harness(**{"policy": "continuum", "num_tokens": 1024, **more})
    scene.turn_s = 0.01
    return scene


def turn(scene: Harness, rid: str, prompt: list[int], job: str = "job", *, new: int = 4, **more) -> list[int]:
    """One step of a job, to its end. Returns prompt and output."""
    scene.add(rid, prompt, new, job_id=job, **more)
    scene.run()
    tokens = scene.outcomes[rid, 0].tokens
    assert tokens == expected_output(prompt, new, frozenset())
    return prompt + tokens


def path(scene: Harness, rid: str) -> str | None:
    request = scene.outcomes[rid, 0].request
    assert request is not None
    return request.inheritance.path if request.inheritance is not None else None


@PAGES
def test_next_step_of_job_takes_over_its_pin(page_size):
    scene = harness(page_size=page_size)
    said = turn(scene, "a", PROMPT)
    assert scene.scheduler._leases.leased_tokens > 0
    said = turn(scene, "b", [*said, 7, 7, 7])
    request = scene.outcomes["b", 0].request
    assert request is not None and request.inheritance is not None
    assert path(scene, "b") == "handoff" and request.inheritance.recomputed_tokens <= 1
    turn(scene, "c", [*said, 9], is_last_step=True)
    assert scene.scheduler._leases.leased_tokens == 0
    stats = scene.scheduler.stats().jobs
    assert (stats.pins, stats.hits, stats.broken, stats.expired) == (2, 2, 0, 0)


def test_request_without_job_id_opens_no_job_where_nothing_is_pinned():
    scene = harness(policy="fcfs")
    scene.add("a", PROMPT, 4)
    scene.run()
    assert len(scene.scheduler._leases) == 0 and scene.scheduler.stats().jobs.jobs == 0


def test_fcfs_pins_nothing():
    scene = harness(policy="fcfs")
    turn(scene, "a", PROMPT)
    assert len(scene.scheduler._leases) == 0 and scene.scheduler.stats().jobs.jobs == 1


def test_unused_pin_expires():
    scene = harness()
    turn(scene, "a", PROMPT)
    scene.now += 2.0
    scene.scheduler.next_batch(scene.now)
    assert len(scene.scheduler._leases) == 0
    assert scene.scheduler.stats().jobs.expired == 1


def test_retain_ttl_outlasts_pin():
    scene = harness()
    turn(scene, "a", PROMPT, retain_ttl=50.0)
    scene.scheduler.record_tool_calls("a", 0, BASH, scene.now)
    scene.now += 40.0
    scene.step()
    assert len(scene.scheduler._leases) == 1


def test_turn_dropping_a_thought_reuses_prefix_of_pin():
    scene = harness()
    said = turn(scene, "a", PROMPT, new=30)
    turn(scene, "b", said[:80] + [5] * 20)
    request = scene.outcomes["b", 0].request
    assert request is not None and request.found.total == 80
    assert path(scene, "b") == "handoff"


def test_diverging_request_leaves_pin_alone():
    scene = harness()
    said = turn(scene, "a", PROMPT)
    turn(scene, "other", PROMPT[:10] + [3] * 40)
    assert path(scene, "other") is None
    turn(scene, "b", [*said, 8])
    assert path(scene, "b") == "handoff"


def test_concurrent_steps_of_one_job():
    scene = harness()
    said = turn(scene, "a", PROMPT)
    for number in range(3):
        scene.add(f"b{number}", said + [number] * 5, 4, job_id="job")
    scene.run()
    for number in range(3):
        assert scene.outcomes[f"b{number}", 0].tokens == expected_output(said + [number] * 5, 4, frozenset())
    assert len(scene.scheduler._leases) == 3
    turn(scene, "end", [1, 2, 3], is_last_step=True)
    assert len(scene.scheduler._leases) == 0


def test_steps_ending_after_last_step_are_not_pinned():
    """What ends after the last step is not pinned any more."""
    scene = harness()
    scene.add("long", PROMPT, 40, job_id="job")
    turn_end = [4] * 9
    scene.add("last", turn_end, 2, job_id="job", is_last_step=True)
    scene.run()
    assert len(scene.scheduler._leases) == 0 and scene.scheduler.stats().jobs.pins == 0


def test_job_id_after_last_step_opens_new_job():
    scene = harness()
    turn(scene, "a", PROMPT, is_last_step=True)
    (first,) = scene.scheduler.describe_jobs("", "job", scene.now)
    assert first["is_over"]
    turn(scene, "b", PROMPT)
    (second,) = scene.scheduler.describe_jobs("", "job", scene.now)
    assert not second["is_over"] and second["turns"] == 1 and second["age_s"] < first["age_s"] + 1e9
    assert scene.scheduler.stats().jobs.jobs == 1


def test_job_id_is_reusable_while_old_request_runs():
    scene = harness()
    scene.add("long", [8] * 20, 60, job_id="job")
    scene.add("last", PROMPT, 2, job_id="job", is_last_step=True)
    while "last" not in {rid for rid, _ in scene.outcomes} or scene.outcomes["last", 0].finish is None:
        scene.step()
    scene.add("anew", [4] * 30, 4, job_id="job")
    scene.run()
    (job,) = scene.scheduler.describe_jobs("", "job", scene.now)
    assert not job["is_over"] and job["turns"] == 1 and job["open_requests"] == []
    assert scene.scheduler.stats().jobs.pins == 1, "the new job's step, not what is left of the old one"
    assert scene.scheduler._pins.end_job("", "job") == ([], 33)
    assert len(scene.scheduler._leases) == 0 and not scene.scheduler._pins._table._by_rid


def test_aborted_last_step_does_not_end_job():
    scene = harness()
    said = turn(scene, "a", PROMPT)
    scene.add("b", [*said, 1], 30, job_id="job", is_last_step=True)
    scene.step()
    scene.abort("b")
    (job,) = scene.scheduler.describe_jobs("", "job", scene.now)
    assert not job["is_over"] and job["open_requests"] == []
    turn(scene, "c", [*said, 1], is_last_step=True)


def test_ending_job_releases_everything_it_holds():
    scene = harness()
    said = turn(scene, "a", PROMPT)
    scene.add("b", [5] * 30, 30, job_id="job")
    scene.step()
    rids, tokens = scene.scheduler._pins.end_job("", "job") or ([], 0)
    assert rids == ["b"] and tokens == len(said) - 1
    scene.abort("b")
    assert len(scene.scheduler._leases) == 0
    assert scene.scheduler._pins.end_job("", "job") is None
    scene.run()


def test_jobs_of_different_namespaces_are_separate():
    scene = harness()
    said = turn(scene, "a", PROMPT, namespace="mine")
    scene.add("b", [*said, 3], 4, job_id="job", namespace="yours", is_last_step=True)
    scene.run()
    assert path(scene, "b") is None and len(scene.scheduler._leases) == 1
    assert [job["job_id"] for job in scene.scheduler.describe_jobs("mine", None, scene.now)] == ["job"]


def test_full_job_table_forgets_longest_idle_job():
    scene = harness(max_jobs=2, leases=8)
    for name in ("one", "two", "three"):
        turn(scene, name, [ord(name[0]) % 60 + 1] * 20, job=name, retain_ttl=100.0)
    assert scene.scheduler.describe_jobs("", "one", scene.now) == []
    assert len(scene.scheduler._leases) == 2
    assert {job["job_id"] for job in scene.scheduler.describe_jobs("", None, scene.now)} == {"two", "three"}


def test_many_steps_of_job_accumulate_no_state():
    scene = harness(leases=32, num_tokens=4096, rows=8, max_client_leased_ratio=1.0, leased_ratio=0.9)
    for number in range(30):
        turn(scene, f"r{number}", [number % 50 + 1] * 12)
    assert len(scene.scheduler._leases) <= 8
    assert len(scene.scheduler._pins._table._by_rid) <= 8
    turn(scene, "end", [1, 2], is_last_step=True)
    assert len(scene.scheduler._leases) == 0


def test_tool_calls_of_unknown_steps_change_nothing():
    scene = harness()
    turn(scene, "a", PROMPT)
    deadline = scene.scheduler.next_lease_deadline
    scene.scheduler.record_tool_calls("nobody", 0, BASH, scene.now)
    scene.scheduler.record_tool_calls("a", 3, BASH, scene.now)
    assert scene.scheduler.next_lease_deadline == deadline


def test_refused_request_opens_no_job():
    scene = harness()
    with pytest.raises(Exception, match="context"):
        scene.add("a", [1] * 400, 4, job_id="job")
    assert scene.scheduler.stats().jobs.jobs == 0


def test_memory_pressure_breaks_pins():
    """A stranger that runs alone gets the memory of any pin, and the job goes on without."""
    scene = harness(num_tokens=128, leased_ratio=0.9, max_client_leased_ratio=1.0)
    said = turn(scene, "a", PROMPT)
    scene.add("big", [9] * 100, 4)
    scene.run()
    assert scene.scheduler.stats().jobs.broken == 1
    turn(scene, "b", [*said, 2])
    assert path(scene, "b") == "match"


def test_job_trace_records_all_events():
    scene = harness()
    scene.scheduler.trace_jobs()
    said = turn(scene, "a", PROMPT)
    scene.scheduler.record_tool_calls("a", 0, BASH, scene.now)
    turn(scene, "b", [*said, 2], is_last_step=True)
    events = scene.scheduler.take_job_events()
    assert [event["event"] for event in events] == [
        "arrival", "departure", "pinned", "called", "returned", "arrival", "unpinned", "departure",
    ]  # fmt: skip
    assert events[6]["reason"] == "hits" and events[4]["tools"] == ["ls"] and events[7]["hit_tokens"] == len(said) - 1
    assert scene.scheduler.take_job_events() == []


def test_kv_of_finished_job_is_evicted_first() -> None:
    """But not what it found there when it began, nor what others use."""
    left = {}
    for policy in ("handoff", "continuum"):
        scene = harness(policy=policy, num_tokens=400)
        scene.add("system", PROMPT, 1)
        scene.run()
        scene.add("stranger", [9] * 60, 1)
        scene.run()
        scene.now += 10.0  # their pins expire
        said = turn(scene, "a", [*PROMPT, *[30] * 40])
        said = turn(scene, "b", [*said, *[31] * 40], is_last_step=True)
        scene.cache.evict(80)
        scene.verify()
        left[policy] = [scene.cache.match_len("", np.array(ids, dtype=np.int32)) for ids in (PROMPT, [9] * 60, said)]
    system, stranger, job = left["handoff"]
    assert (system, stranger) == (69, 60) and job < len(PROMPT) + 20
    assert left["continuum"][1] < 60, "by age alone the stranger goes"


@pytest.mark.parametrize("policy", PINNING)
@pytest.mark.parametrize(("asked", "kept"), [(None, 1), (0.0, 0), (0.01, 1)])
def test_no_policy_pins_a_step_whose_client_wants_nothing_kept(policy: str, asked: float | None, kept: int) -> None:
    scene = harness(policy=policy)
    said = turn(scene, "a", PROMPT, retain_ttl=asked)
    assert len(scene.scheduler._leases) == kept
    scene.scheduler.record_tool_calls("a", 0, BASH, scene.now)
    scene.step()
    assert len(scene.scheduler._leases) == kept
    turn(scene, "b", [*said, 2])


def test_handoff_policy_drops_pin_with_host_copy_at_once() -> None:
    scene = harness(policy="handoff", host_tokens=2048)
    said = turn(scene, "a", PROMPT)
    assert len(scene.scheduler._leases) == 1, "until its calls are read"
    scene.scheduler.record_tool_calls("a", 0, BASH, scene.now)
    scene.step()
    assert len(scene.scheduler._leases) == 0
    turn(scene, "b", [*said, 2])


def test_tool_times_are_learned_from_job_steps() -> None:
    scene = harness(policy="handoff")
    said = turn(scene, "a", PROMPT)
    scene.scheduler.record_tool_calls("a", 0, BASH, scene.now)
    scene.now += 0.75
    scene.add("b", [*said, 1], 4, job_id="job")
    scene.add("beside", [*said, 2], 4, job_id="job")  # nothing ended since: no other duration
    assert scene.scheduler._pins.times.history.durations_of("ls").tolist() == [pytest.approx(0.75, abs=0.05)]
    scene.run()
    scene.scheduler.record_tool_calls("b", 0, BASH, scene.now)
    (job,) = scene.scheduler.describe_jobs("", "job", scene.now)
    assert job["last_calls"] is None and job["returns_in_s"] is None, "the last to end has not been read"


def test_finished_job_expects_no_return() -> None:
    scene = harness(policy="handoff")
    said = turn(scene, "a", PROMPT)
    scene.scheduler.record_tool_calls("a", 0, BASH, scene.now)
    scene.now += 0.75
    scene.add("late", [*said, 1], 9, job_id="job")
    scene.add("last", [*said, 2], 2, job_id="job", is_last_step=True)
    scene.run()
    scene.scheduler.record_tool_calls("late", 0, BASH, scene.now)
    (job,) = scene.scheduler.describe_jobs("", "job", scene.now)
    assert job["is_over"] and not job["pins"] and not job["open_requests"]
    assert job["last_calls"] is None and job["returns_in_s"] is None


def expires_in(scene: Harness, job: str) -> float:
    """Seconds until the only pin of a job expires."""
    ((pin,),) = [each["pins"] for each in scene.scheduler.describe_jobs("", job, scene.now)]
    return pin["expires_in_s"]


def test_reused_rid_names_the_later_step():
    scene = harness()
    said = turn(scene, "a", PROMPT)
    scene.scheduler.record_tool_calls("a", 0, BASH, scene.now)
    said = turn(scene, "a", [*said, 7, 7, 7])
    assert path(scene, "a") == "handoff"
    scene.scheduler.record_tool_calls("a", 0, BASH, scene.now)
    assert expires_in(scene, "job") > 1.5, "its calls are known: it is no longer kept for a moment only"
    turn(scene, "a", said[:-10])
    assert path(scene, "a") == "handoff", "there is one pin, and most of it is used"
    stats = scene.scheduler.stats().jobs
    assert stats.hits == 2 and stats.returned_tokens >= stats.returned_hit_tokens > len(PROMPT)


def test_rid_reused_by_another_job_belongs_to_it():
    scene = harness()
    turn(scene, "a", PROMPT, "first")
    turn(scene, "a", PROMPT, "second")
    scene.scheduler._pins.end_job("", "first")
    scene.scheduler.record_tool_calls("a", 0, BASH, scene.now)
    assert expires_in(scene, "second") > 1.5


def test_rid_reused_outside_jobs_is_no_longer_a_step() -> None:
    scene = harness()
    said = turn(scene, "a", PROMPT)
    scene.add("a", [9] * 30, 4, retain_ttl=50.0)
    scene.run()
    turn(scene, "b", [*said, 1])
    assert path(scene, "b") is None and len(scene.scheduler._leases) == 2, "the stranger keeps what is its own"
