from __future__ import annotations

import numpy as np
import pytest

from baton.memory_pool.allocator import DoubleFreeError
from baton.memory_pool.window_pages import WindowedAllocator, WindowPages, least_tokens


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def make(
    windows: int = 64, tokens: int = 128, page: int = 16, window: int = 20
) -> tuple[WindowPages, WindowedAllocator]:
    pages = WindowPages(windows, tokens, page, window, check=True)
    return pages, WindowedAllocator(pages, tokens, check=True)


def extend(allocator: WindowedAllocator, old: int, new: int, last: int = 0) -> np.ndarray | None:
    return allocator.alloc_extend(int32(old), int32(new), int32(last))


@pytest.mark.parametrize("page", [1, 16])
def test_each_page_has_one_of_the_window_pool_beside_it_until_it_is_freed(page: int) -> None:
    pages, allocator = make(page=page)
    first, second = extend(allocator, 0, 20), extend(allocator, 0, 16)
    assert first is not None and second is not None
    beside = pages.slots_of(np.concatenate([first, second]))
    assert len(np.unique(beside)) == 36 and beside.min() >= page
    assert (beside % page == np.concatenate([first, second]) % page).all()
    assert pages.free_tokens == 64 - -(-20 // page) * page - 16 and pages.adds_up
    allocator.free(first)
    assert (pages.slots_of(first) < page).all() and pages.free_tokens == 64 - 16 and pages.adds_up


def test_nothing_is_handed_out_where_either_pool_is_too_small() -> None:
    pages, allocator = make(windows=32)
    for lens in (int32(33), int32(16, 17)):
        assert allocator.alloc_extend(0 * lens, lens, 0 * lens) is None
    assert allocator.spare_tokens == 32 and pages.free_tokens == 32 and allocator.free_tokens == 128
    assert extend(allocator, 0, 32) is not None and allocator.spare_tokens == 0
    assert extend(allocator, 10, 16, 40) is not None, "the rest of a page needs no other"
    assert allocator.room_beside(16) == 16 and make(windows=128)[1].room_beside(16) == 112


def test_a_page_in_quarantine_keeps_its_own() -> None:
    pages, allocator = make()
    fence = allocator.fences.open_fence()
    slots = extend(allocator, 0, 20)
    assert slots is not None
    allocator.quarantine(slots, [fence])
    assert pages.free_tokens == 32
    allocator.fences.close_fence(fence)
    allocator.release_quarantine()
    assert pages.free_tokens == 64


def test_pages_are_evictable_once_no_sequence_holds_them() -> None:
    pages, allocator = make(page=1)
    slots = extend(allocator, 0, 4)
    assert slots is not None and pages.evictable_tokens == 0
    pages.hold(slots[:3])
    pages.drop(slots)
    assert pages.evictable_tokens == 1
    pages.drop(slots[:3])
    assert pages.evictable_tokens == 4
    with pytest.raises(DoubleFreeError, match="held by none"):
        pages.drop(slots[:1])
    assert pages.take_back(slots[:2]) == 2 and pages.take_back(slots[:2]) == 0
    assert (pages.evictable_tokens, pages.free_tokens) == (2, 62)
    with pytest.raises(DoubleFreeError, match="nothing is left"):
        pages.hold(slots)


def test_slots_move_to_pages_with_the_same_tokens() -> None:
    pages, allocator = make(page=1)
    theirs, ours = extend(allocator, 0, 3), extend(allocator, 0, 3)
    assert theirs is not None and ours is not None
    pages.drop(theirs)
    pages.take_back(theirs[:2])
    before = pages.slots_of(ours)
    pages.move(ours, theirs)
    assert (pages.slots_of(theirs)[:2] == before[:2]).all() and pages.slots_of(theirs)[2] != before[2]
    assert pages.slots_of(ours).tolist() == [0, 0, before[2]]
    assert pages.holders[theirs].tolist() == [1, 1, 1] and pages.evictable_tokens == 0
    allocator.free(ours)
    assert pages.free_tokens == 61 and pages.adds_up


def test_what_was_lost_is_counted_anew() -> None:
    pages, allocator = make(page=16)
    slots, lost = extend(allocator, 0, 20), extend(allocator, 0, 16)
    assert slots is not None and lost is not None
    pages.holders[:] = 7
    allocator.rebuild(slots, [])
    pages.recount(allocator.free_pages(), [slots[::16] // 16, slots[16::16] // 16], int32())
    assert pages.holders[slots[::16] // 16].tolist() == [1, 2] and pages.evictable_tokens == 0
    pages.recount(allocator.free_pages(), [slots[:16:16] // 16], slots[16::16] // 16)
    assert pages.holders[slots[::16] // 16].tolist() == [1, 1] and pages.evictable_tokens == 0
    pages.recount(allocator.free_pages(), [slots[:16:16] // 16], int32())
    assert pages.holders[slots[::16] // 16].tolist() == [1, 0] and pages.evictable_tokens == 16
    assert pages.free_tokens == 32 and pages.adds_up and not pages.has_doubled
    pages.of_page[slots[0] // 16] = pages.of_page[slots[16] // 16]
    assert pages.has_doubled
    allocator.reset()
    assert pages.free_tokens == 64 and pages.adds_up


def test_a_request_can_run_alone_with_the_least() -> None:
    for page in (1, 16, 64):
        pages, _ = make(1024, 1024, page, window=20)
        assert least_tokens(20, page, 7) >= pages.kept_tokens + 7 and least_tokens(20, page, 7) % page == 0
        assert pages.first_kept(300) <= pages.first_needed(300) <= 300 - 19 and pages.first_needed(5) == 0
