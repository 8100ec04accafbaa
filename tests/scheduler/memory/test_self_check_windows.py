"""The window pool: what does not add up is found, and healed or contained, and the server continues."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from baton.memory_pool.window_pages import WindowPages
from baton.scheduler.memory.self_check import free_lost_windows
from tests.doubles.beam_search_scene import PROMPT, search
from tests.doubles.beam_search_scene import add as add_search
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness

WINDOW = 20
PAGES = pytest.mark.parametrize("page_size", [1, 16])


def crowded(page_size: int) -> Harness:
    """Pages of the window pool of every kind: cached, leased, held by requests and by beams, and in quarantine."""
    harness = Harness(num_tokens=2048, page_size=page_size, rows=8, depth=2, window=WINDOW, window_tokens=1024)
    harness.add("leased", prompt_of(71, 1), 3, retain_ttl=100.0)
    harness.add("cached", prompt_of(75, 5), 3)
    harness.run()
    add_search(harness, "search", PROMPT, search(3, 20))
    for rid in ("running", "gone"):
        harness.add(rid, prompt_of(70, len(rid)), 30)
    for _ in range(6):
        harness.step()
    harness.abort("gone")  # a step in flight still writes for it
    assert harness.allocator.quarantined_tokens and pool_of(harness).evictable_tokens
    return harness


def pool_of(harness: Harness) -> WindowPages:
    assert harness.windows is not None
    return harness.windows


def pages_of(harness: Harness, rid: str) -> np.ndarray:
    """int32 [n]: the pages of which a request holds the slots in the window pool."""
    request = harness.outcomes[rid, 0].request
    assert request is not None
    kv, page = request.held_kv, harness.allocator.page_size
    return harness.pool.rows[kv.row, kv.window_start : kv.length : page] // page


def cached_pages(harness: Harness) -> np.ndarray:
    """int32 [n]: pages of the tree alone."""
    pages = pool_of(harness)
    return np.flatnonzero((pages.of_page > 0) & (pages.holders == 0))


def lose_free_slots(harness: Harness) -> int:
    assert pool_of(harness)._allocator.take_pages(3) is not None
    return 3


def lose_cached_slots(harness: Harness) -> int:
    pool_of(harness).of_page[cached_pages(harness)[:2]] = 0
    return 2


def count_too_few_holders(harness: Harness) -> int:
    pool_of(harness).holders[pages_of(harness, "running")] = 0
    return 0


def count_too_many_holders(harness: Harness) -> int:
    pool_of(harness).holders[cached_pages(harness)] = 2
    return 0


@PAGES
def test_a_sound_window_pool_is_left_alone(page_size: int, caplog: pytest.LogCaptureFixture) -> None:
    harness = crowded(page_size)
    before = pool_of(harness).of_page.copy()
    assert harness.scheduler.self_check(harness.now) == []
    assert np.array_equal(pool_of(harness).of_page, before) and not caplog.records


@PAGES
@pytest.mark.parametrize("damage", [lose_free_slots, lose_cached_slots, count_too_few_holders, count_too_many_holders])
def test_lost_slots_and_wrong_counts_are_healed(
    damage: Callable[[Harness], int], page_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    harness = crowded(page_size)
    lost = damage(harness) * page_size
    assert harness.scheduler.self_check(harness.now) == []
    assert harness.scheduler.stats().window_pool.leaked_tokens == lost
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the window pool does not add up: {lost} tokens are nowhere; pages with ")
    harness.verify()
    harness.run()
    assert harness.outcomes["running", 0].tokens == expected_output(prompt_of(70, 7), 30, reach=WINDOW)
    harness.add("again", [*prompt_of(75, 5), 1, 2], 4)
    harness.run()
    assert harness.outcomes["again", 0].tokens == expected_output([*prompt_of(75, 5), 1, 2], 4, reach=WINDOW)
    assert harness.scheduler.flush_cache() and pool_of(harness).free_tokens == pool_of(harness).total_tokens


def give_slots_twice(harness: Harness) -> None:
    pages = pool_of(harness)
    pages.of_page[pages_of(harness, "running")[0]] = pages.of_page[pages_of(harness, "running")[-1]]


def free_held_slots(harness: Harness) -> None:
    pages, held = pool_of(harness), pages_of(harness, "running")[:1]
    pages._allocator.free(pages.of_page[held])


def take_slots_away(harness: Harness) -> None:
    pool_of(harness).take_back(pages_of(harness, "running")[:1])


@PAGES
@pytest.mark.parametrize("damage", [give_slots_twice, free_held_slots, take_slots_away])
def test_slots_that_may_be_read_wrong_fail_the_requests_and_reset_the_cache(
    damage: Callable[[Harness], None], page_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    harness = crowded(page_size)
    harness.add("waiting", prompt_of(70, 4), 5)
    damage(harness)
    events = harness.scheduler.self_check(harness.now)
    assert {event.request.rid for event in events} == {"running", "search"}
    assert all(event.finish is not None and event.finish.type == "abort" for event in events)
    assert "the window pool does not add up: " in caplog.text
    harness._take(events)
    harness.verify()
    harness.run()
    assert harness.outcomes["waiting", 0].tokens == expected_output(prompt_of(70, 4), 5, reach=WINDOW)
    assert harness.scheduler.flush_cache() and pool_of(harness).free_tokens == pool_of(harness).total_tokens


def test_models_without_windows_have_nothing_to_check() -> None:
    harness = Harness()
    assert free_lost_windows(harness.cache, [], []) == (0, True)
