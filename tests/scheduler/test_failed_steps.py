"""What a failed step leaves behind: nothing that was never written, and nothing that stays out of reach."""

from __future__ import annotations

from collections import deque

import pytest
from beam_search_scene import PROMPT, add, search
from kv_echo import expected_beams, expected_output, prompt_of
from scheduler_harness import Harness

from baton.scheduler.batch import StepResult


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_copies_that_were_never_made_are_shared_with_nobody(page_size: int) -> None:
    """A child takes over the lease of a beam's result, whose pages its first step would have filled."""
    harness = Harness(num_tokens=8192, page_size=page_size, rows=24, chunk=64)
    params = search(4, 40, n=2)
    add(harness, "find", PROMPT, params, retain_ttl=100.0)
    harness.continue_from("find", "child", [50], 6, index=1)
    while harness.outcomes["find", 0].finish is None:
        harness.step()
    batch = harness.scheduler.next_batch(harness.now)
    assert batch is not None and len(batch.copies)
    harness._take(harness.scheduler.fail_step(harness.now, "launch failed"))
    harness.verify()
    result = expected_beams(PROMPT, params, None, frozenset())[1]
    prompt = [*PROMPT, *result.ids.tolist(), 77, 78]
    harness.add("again", prompt, 6)
    harness.run()
    assert harness.outcomes["again", 0].tokens == expected_output(prompt, 6)


def test_a_request_admitted_on_copies_of_a_step_that_fails_later_ends_with_it() -> None:
    """The copies went with a decode step; the child that needs them was admitted into the step after it."""
    harness = Harness(num_tokens=2048, page_size=16, rows=3, depth=2, chunk=32)
    scheduler = harness.scheduler
    harness.add("parent", prompt_of(22), 60)
    for _ in range(6):
        harness.step()
    harness.add("long", prompt_of(40, 5), 4)  # after its first chunk a decode is due
    harness.step()
    harness.continue_from("parent", "child", [50], 6, at="now")
    results: deque[StepResult | None] = harness._results  # pyright: ignore[reportAssignmentType]
    has_failed = False
    while not has_failed:
        batch = scheduler.next_batch(harness.now)
        assert batch is not None
        results.append(None if len(batch.copies) else harness.model.forward(batch))
        if len(results) == 2:
            result = results.popleft()
            has_failed = result is None
            events = (
                scheduler.fail_step(harness.now, "wait failed")
                if result is None
                else scheduler.process_result(result, harness.now)
            )
            harness._take(events)
            harness.verify()
    finish = harness.outcomes["child", 0].finish
    assert finish is not None and finish.message == "wait failed"
    harness.run()


def test_what_a_lease_holds_comes_back_though_the_step_that_wrote_it_failed() -> None:
    prompt = prompt_of(20)
    eos = (expected_output(prompt, 6)[3],)
    harness = Harness(num_tokens=256, page_size=16, depth=2, eos=eos, leased_ratio=1.0)
    harness.add("parent", prompt, 100, retain_ttl=5.0)
    scheduler, results = harness.scheduler, deque[StepResult]()
    while harness.outcomes["parent", 0].finish is None:
        batch = scheduler.next_batch(harness.now)
        if batch is not None:
            results.append(harness.model.forward(batch))
        if len(results) == 2 or batch is None:
            harness._take(scheduler.process_result(results.popleft(), harness.now))
    assert len(results) == 1, "a step is in flight that writes for the lease"
    harness._take(scheduler.fail_step(harness.now, "wait failed"))
    harness.now += 100.0
    assert scheduler.next_batch(harness.now) is None
    assert len(scheduler.leases) == 0 and harness.allocator.quarantined_tokens == 0
    harness.add("large", prompt_of(200, 3), 20, ignore_eos=True)
    harness.run()
    assert harness.outcomes["large", 0].finish is not None
