"""What a failed step leaves behind: nothing that was never written, and nothing that stays out of reach."""

from __future__ import annotations

import pytest

from tests.doubles.beam_search_scene import PROMPT, add, search
from tests.doubles.kv_echo import expected_beams, expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_copies_never_made_are_not_shared(page_size: int) -> None:
    """A child takes over the lease of a beam's result, whose pages its first step would have filled."""
    harness = Harness(num_tokens=8192, page_size=page_size, rows=24, chunk=64)
    params = search(4, 40, n=2)
    add(harness, "find", PROMPT, params, retain_ttl=100.0)
    harness.continue_from("find", "child", [50], 6, index=1)
    while harness.outcomes["find", 0].finish is None:
        harness.step()
    harness.fault = lambda batch: "copies" if len(batch.copies) else None
    harness.step()
    assert harness.failed
    result = expected_beams(PROMPT, params, None, frozenset())[1]
    prompt = [*PROMPT, *result.ids.tolist(), 77, 78]
    harness.add("again", prompt, 6)
    harness.run()
    assert harness.outcomes["again", 0].tokens == expected_output(prompt, 6)


def test_request_relying_on_copies_of_failed_step_fails_too() -> None:
    """The copies went with a decode step; the child that needs them was admitted into the step after it."""
    harness = Harness(num_tokens=2048, page_size=16, rows=3, depth=2, chunk=32)
    harness.add("parent", prompt_of(22), 60)
    for _ in range(6):
        harness.step()
    harness.add("long", prompt_of(40, 5), 4)  # after its first chunk a decode is due
    harness.step()
    harness.continue_from("parent", "child", [50], 6, at="now")
    harness.fault = lambda batch: "finish" if len(batch.copies) else None
    while not harness.failed:
        harness.step()
    finish = harness.outcomes["child", 0].finish
    assert finish is not None and finish.message == "failed before finish"
    harness.run()


@pytest.mark.parametrize("page_size", [16, 64])
def test_lease_with_copies_never_made_is_dropped(page_size: int) -> None:
    """A fork's lease is filled by a step that computes only the parent; the child waits for a row."""
    harness = Harness(num_tokens=1024, page_size=page_size, rows=1)
    prompt = prompt_of(22)
    harness.add("parent", prompt, 60)
    for _ in range(4):
        harness.step()
    said = list(harness.outcomes["parent", 0].tokens)
    harness.continue_from("parent", "child", [50], 6, at="now")
    assert len(harness.scheduler._leases) == 1
    harness.fault = lambda batch: "copies" if len(batch.copies) else None
    harness.step()
    assert harness.failed == {"parent"} and len(harness.scheduler._leases) == 0
    harness.run()
    assert harness.outcomes["child", 0].tokens == expected_output([*prompt, *said, 50], 6)


def test_lease_pages_are_freed_although_their_step_failed() -> None:
    prompt = prompt_of(20)
    eos = (expected_output(prompt, 6)[3],)
    harness = Harness(num_tokens=256, page_size=16, depth=2, eos=eos, leased_ratio=1.0)
    harness.add("parent", prompt, 100, retain_ttl=5.0)
    harness.fault = lambda batch: "finish" if batch.step_id == 4 else None  # in flight when the parent ends
    harness.run()
    outcome = harness.outcomes["parent", 0]
    assert outcome.finish is not None and outcome.finish.type == "stop" and harness.scheduler.stats().steps == 5
    harness.now += 100.0
    assert not harness.step()
    assert len(harness.scheduler._leases) == 0 and harness.allocator.quarantined_tokens == 0
    harness.add("large", prompt_of(200, 3), 20, ignore_eos=True)
    harness.run()
    assert harness.outcomes["large", 0].finish is not None
