from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.request import Request
from baton.scheduler.speculation.speculation import extend_with_drafts, keep_first
from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness


def numbers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def running_request(harness: Harness, length: int, seed: int) -> Request:
    harness.add(f"r{seed}", prompt_of(length, seed), 20)
    harness.step()
    request = harness.outcomes[f"r{seed}", 0].request
    assert request is not None
    return request


@PAGES
@pytest.mark.parametrize("drafted", [(0, 5), (70, 1), (3, 0)])
def test_draft_slots_are_allocated_and_rejected_ones_freed(page_size: int, drafted: tuple[int, int]) -> None:
    harness = Harness(page_size=page_size, num_tokens=1024)
    requests = [running_request(harness, 20, 1), running_request(harness, 33, 2)]
    free = harness.allocator.free_tokens
    rows = numbers(*(request.held_kv.row for request in requests))
    lengths = numbers(*(request.scheduled_len for request in requests))
    slots = extend_with_drafts(harness.scheduler._memory, rows, lengths, numbers(*drafted))
    assert slots is not None and len(slots) == 2 + sum(drafted)
    written = [harness.pool.rows[row, old : old + 1 + more] for row, old, more in zip(rows, lengths, drafted)]
    assert np.array_equal(np.concatenate(written), slots) and len(set(slots.tolist())) == len(slots)
    for request, more in zip(requests, drafted):
        old = request.scheduled_len
        request.held_kv.length = old + 1 + more
        keep_first(harness.scheduler._memory, request, old)
        assert request.held_kv.length == request.committed_len == request.scheduled_len == old
    assert harness.allocator.free_tokens == free
    harness.verify()
    harness.run()


def test_draft_slots_evict_cache_but_break_no_lease() -> None:
    harness = Harness(num_tokens=128, leased_ratio=1.0)
    harness.add("kept", prompt_of(40), 1, retain_ttl=1000.0)
    harness.run()
    harness.add("cached", prompt_of(30, 1), 1)
    harness.run()
    request = running_request(harness, 20, 2)
    memory, free = harness.scheduler._memory, harness.allocator.free_tokens
    row, length = numbers(request.held_kv.row), numbers(request.scheduled_len)
    assert extend_with_drafts(memory, row, length, numbers(free + 30)) is None
    assert harness.allocator.free_tokens == free and harness.scheduler.stats().leases_broken == 0
    slots = extend_with_drafts(memory, row, length, numbers(free + 29))
    assert slots is not None, "what is cached for nobody makes room"
    harness.allocator.free(slots)
    harness.verify()
    harness.run()
