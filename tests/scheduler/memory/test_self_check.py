"""A pool that does not add up is found, contained, and the server goes on."""

from __future__ import annotations

import numpy as np
import pytest
from kv_echo import expected_output, prompt_of
from scheduler_harness import Harness


def busy(page_size: int) -> Harness:
    """A harness with a running, a waiting and a leased request."""
    harness = Harness(page_size=page_size, rows=2)
    harness.add("leased", prompt_of(70, 1), 3, retain_ttl=100.0)
    harness.run()
    harness.add("running", prompt_of(70, 2), 30)
    harness.add("other", prompt_of(70, 3), 30)
    harness.step()
    harness.add("waiting", prompt_of(70, 4), 5)
    harness.step()
    return harness


PAGES = pytest.mark.parametrize("page_size", [1, 16])


@PAGES
def test_a_sound_pool_is_left_alone(page_size: int) -> None:
    harness = busy(page_size)
    assert harness.scheduler.self_check(harness.now) == []
    assert harness.scheduler.stats().leaked_tokens == 0


@PAGES
def test_leaked_pages_are_reclaimed(page_size: int, caplog: pytest.LogCaptureFixture) -> None:
    harness = busy(page_size)
    zero = np.zeros(1, dtype=np.int32)
    lost = harness.allocator.alloc_extend(zero, zero + 3 * page_size, zero)
    assert lost is not None
    assert harness.scheduler.self_check(harness.now) == []
    assert harness.scheduler.stats().leaked_tokens == 3 * page_size
    assert "3 pages without an owner" in caplog.text
    harness.verify()
    harness.run()
    assert harness.outcomes["running", 0].tokens == expected_output(prompt_of(70, 2), 30)


@PAGES
def test_a_page_with_two_owners_fails_what_holds_kv_and_starts_afresh(
    page_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    harness = busy(page_size)
    request = harness.outcomes["running", 0].request
    assert request is not None
    harness.allocator.free(harness.pool.rows[request.held_kv.row, :page_size].copy())
    events = harness.scheduler.self_check(harness.now)
    assert {event.request.rid for event in events} == {"running", "other"}
    assert all(event.finish is not None and event.finish.type == "abort" for event in events)
    assert "1 with more than one" in caplog.text
    assert len(harness.scheduler.leases) == 0
    harness._take(events)
    harness.verify()
    harness.run()
    assert harness.outcomes["waiting", 0].tokens == expected_output(prompt_of(70, 4), 5)
    harness.continue_from("leased", "child", [1], 4)
    harness.run()
    full = prompt_of(70, 1) + harness.outcomes["leased", 0].tokens + [1]
    assert harness.outcomes["child", 0].tokens == expected_output(full, 4)
