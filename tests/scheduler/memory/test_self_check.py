"""A pool that does not add up is found, contained, and the server goes on."""

from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.memory.self_check import audit_pages
from tests.doubles.beam_search_scene import PROMPT, search
from tests.doubles.beam_search_scene import add as add_search
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness


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


def crowded(page_size: int) -> Harness:
    """As `busy`, with pages of every other kind: cached, in quarantine, and held by the beams of a search."""
    harness = Harness(num_tokens=2048, page_size=page_size, rows=8, depth=2)
    harness.add("leased", prompt_of(71, 1), 3, retain_ttl=100.0)
    harness.add("cached", prompt_of(75, 5), 3)
    harness.run()
    add_search(harness, "search", PROMPT, search(3, 20))
    for rid in ("running", "gone"):
        harness.add(rid, prompt_of(70, len(rid)), 30)
    for _ in range(6):
        harness.step()
    harness.abort("gone")  # a step in flight still writes for it
    stats = harness.scheduler.stats()
    assert harness.allocator.quarantined_tokens and stats.evictable_tokens and stats.leased_tokens
    search_request = harness.outcomes["search", 0].request
    assert search_request is not None and search_request.beam_kv is not None
    assert search_request.beam_kv.length > search_request.beam_kv.start
    return harness


def leak(harness: Harness, pages: int) -> None:
    """Take pages off the free list and forget them."""
    zero = np.zeros(1, dtype=np.int32)
    assert harness.allocator.alloc_extend(zero, zero + pages * harness.allocator.page_size, zero) is not None


@PAGES
@pytest.mark.parametrize("scene", [busy, crowded])
def test_self_check_leaves_sound_pool_alone(scene, page_size: int, caplog: pytest.LogCaptureFixture) -> None:
    harness = scene(page_size)
    assert harness.scheduler.self_check(harness.now) == []
    assert harness.scheduler.stats().leaked_tokens == 0
    assert not caplog.records, "the sums alone must tell: to look at every page takes long"


@PAGES
@pytest.mark.parametrize("pages", [1, 2, 20])
def test_self_check_distinguishes_leaked_and_held_pages(
    page_size: int, pages: int, caplog: pytest.LogCaptureFixture
) -> None:
    harness = crowded(page_size)
    free = set(harness.allocator.free_pages().tolist())
    leak(harness, pages)
    lost = sorted(free - set(harness.allocator.free_pages().tolist()))
    assert harness.scheduler.self_check(harness.now) == []
    assert harness.scheduler.stats().leaked_tokens == pages * page_size
    assert set(harness.allocator.free_pages().tolist()) == free
    (record,) = caplog.records
    lines = record.getMessage().splitlines()
    assert lines[0] == (
        f"the KV pool does not add up: {pages} pages without an owner {lost[:16]}, 0 with more than one []"
    )
    assert [line.startswith("KVSequence(") for line in lines[1:5]] == [True, True, True, False]
    assert lines[4].startswith("node #0 ")
    harness.run()
    assert harness.outcomes["running", 0].tokens == expected_output(prompt_of(70, 7), 30)


@pytest.mark.parametrize("pages", [1, 2])
def test_page_audit_covers_last_pages(pages: int) -> None:
    harness = Harness(num_tokens=64, page_size=16)
    leak(harness, pages)
    audit = audit_pages(harness.cache, [])
    assert audit.missing.tolist() == [3, 4][-pages:] and audit.doubled.tolist() == []
    assert audit.missing.dtype == audit.doubled.dtype == np.int32


@PAGES
def test_leaked_pages_are_reclaimed(page_size: int, caplog: pytest.LogCaptureFixture) -> None:
    harness = busy(page_size)
    leak(harness, 3)
    assert harness.scheduler.self_check(harness.now) == []
    assert harness.scheduler.stats().leaked_tokens == 3 * page_size
    assert "3 pages without an owner" in caplog.text
    harness.verify()
    harness.run()
    assert harness.outcomes["running", 0].tokens == expected_output(prompt_of(70, 2), 30)


@PAGES
def test_page_with_two_owners_fails_requests_and_resets_cache(page_size: int, caplog: pytest.LogCaptureFixture) -> None:
    harness = busy(page_size)
    request = harness.outcomes["running", 0].request
    assert request is not None
    leak(harness, 2)
    harness.allocator.free(harness.pool.rows[request.held_kv.row, :page_size].copy())
    events = harness.scheduler.self_check(harness.now)
    assert {event.request.rid for event in events} == {"running", "other"}
    assert all(event.finish is not None and event.finish.type == "abort" for event in events)
    assert "1 with more than one" in caplog.text
    assert harness.scheduler.stats().leaked_tokens == 2 * page_size
    assert len(harness.scheduler._leases) == 0
    harness._take(events)
    harness.verify()
    harness.run()
    assert harness.outcomes["waiting", 0].tokens == expected_output(prompt_of(70, 4), 5)
    harness.continue_from("leased", "child", [1], 4)
    harness.run()
    full = prompt_of(70, 1) + harness.outcomes["leased", 0].tokens + [1]
    assert harness.outcomes["child", 0].tokens == expected_output(full, 4)
