from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.memory_pool.allocator import Allocator, DoubleFreeError

PAGE_SIZES = [1, 2, 16, 64]


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def slow_extend(
    free_pages: list[int], page: int, old_lens: list[int], new_lens: list[int], last_slots: list[int]
) -> list[int]:
    """What alloc_extend must return, one token at a time, given the pages it takes in order."""
    pages = iter(free_pages)
    out = []
    for old, new, slot in zip(old_lens, new_lens, last_slots):
        for position in range(old, new):
            slot = next(pages) * page if position % page == 0 else slot + 1
            out.append(slot)
    return out


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_all_tokens_are_allocated_once_and_page_0_never(page: int) -> None:
    allocator = Allocator(8 * page, page, check=True)
    assert allocator.total_tokens == allocator.free_tokens == 8 * page
    slots = allocator.alloc_extend(int32(0), int32(8 * page), int32(0))
    assert slots is not None
    assert slots.dtype == np.int32
    assert sorted(slots.tolist()) == list(range(page, 9 * page))
    assert allocator.free_tokens == 0
    assert allocator.alloc_extend(int32(0), int32(1), int32(0)) is None
    allocator.free(slots)
    assert allocator.free_tokens == 8 * page


def test_smallest_and_largest_pool_sizes() -> None:
    assert (Allocator(1).page_size, Allocator(1).free_tokens) == (1, 1)
    assert Allocator(16, 16).free_tokens == 16
    page = 2**20
    largest = Allocator(2**31 - page, page)  # with the padding page: all numbers an int32 has, from 0 on
    slots = largest.alloc_extend(int32(0), int32(1), int32(0))
    assert slots is not None and slots.dtype == np.int32 and int(slots[0]) == 2**31 - page
    with pytest.raises(ValueError, match="does not fit int32"):
        Allocator(2**31, page)


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_empty_requests_allocate_nothing(page: int) -> None:
    allocator = Allocator(8 * page, page, check=True)
    for old, new in ((int32(), int32()), (int32(5, 0), int32(5, 0))):
        slots = allocator.alloc_extend(old, new, np.full(len(old), page, dtype=np.int32))
        assert slots is not None
        assert len(slots) == 0
        assert allocator.tokens_needed(old, new) == 0
    allocator.free(int32())
    allocator.quarantine(int32(), [allocator.fences.open_fence()])
    assert allocator.free_tokens == 8 * page
    assert allocator.quarantined_tokens == 0


@settings(max_examples=300, deadline=None)
@given(
    page=st.sampled_from([1, 2, 4, 16]),
    lens=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), max_size=40),
    seed=st.integers(0, 2**16),
)
def test_alloc_extend_equals_token_by_token(page: int, lens: list[tuple[int, int]], seed: int) -> None:
    rng = random.Random(seed)
    allocator = Allocator(64 * page, page, check=True)
    old_lens = [old for old, _ in lens]
    new_lens = [old + more for old, more in lens]
    # Any slot that is the right one of its page; far away pages, so that a wrong base shows.
    last_slots = [(1000 + rng.randrange(100)) * page + (old - 1) % page for old in old_lens]
    arguments = int32(*old_lens), int32(*new_lens), int32(*last_slots)
    stack = allocator.free_pages().tolist()
    needed = allocator.tokens_needed(arguments[0], arguments[1])
    slots = allocator.alloc_extend(*arguments)
    if needed > 64 * page:
        assert slots is None
        assert allocator.free_pages().tolist() == stack
        return
    assert slots is not None
    assert slots.dtype == np.int32
    assert allocator.free_tokens == 64 * page - needed
    taken = stack[len(stack) - needed // page :]
    assert slots.tolist() == slow_extend(taken, page, old_lens, new_lens, last_slots)


@settings(max_examples=100, deadline=None)
@given(page=st.sampled_from([2, 4, 16]), old_lens=st.lists(st.integers(0, 70), max_size=80), seed=st.integers(0, 99))
def test_decode_allocation_equals_token_by_token(page: int, old_lens: list[int], seed: int) -> None:
    rng = random.Random(seed)
    allocator = Allocator(20 * page, page, check=True)
    last_slots = [(1000 + rng.randrange(100)) * page + (old - 1) % page for old in old_lens]
    new_lens = [old + 1 for old in old_lens]
    stack = allocator.free_pages().tolist()
    slots = allocator.alloc_extend(int32(*old_lens), int32(*new_lens), int32(*last_slots))
    needed = sum(old % page == 0 for old in old_lens)
    if needed > 20:
        assert slots is None
        assert allocator.free_pages().tolist() == stack
        return
    assert slots is not None
    assert slots.dtype == np.int32
    assert slots.tolist() == slow_extend(stack[20 - needed :], page, old_lens, new_lens, last_slots)
    assert allocator.free_tokens == (20 - needed) * page


@pytest.mark.parametrize("page", PAGE_SIZES)
@pytest.mark.parametrize("count", [31, 32, 33, 100])
def test_large_batches_are_allocated_like_small_ones(page: int, count: int) -> None:
    rng = random.Random(count)
    allocator = Allocator(512 * page, page, check=True)
    old_lens = [rng.randrange(3 * page) for _ in range(count)]
    new_lens = [old + rng.randrange(3) for old in old_lens]
    last_slots = [1000 * page + (old - 1) % page for old in old_lens]
    arguments = int32(*old_lens), int32(*new_lens), int32(*last_slots)
    stack = allocator.free_pages().tolist()
    needed = allocator.tokens_needed(*arguments[:2])
    assert needed == sum(-(-new // page) - -(-old // page) for old, new in zip(old_lens, new_lens)) * page
    slots = allocator.alloc_extend(*arguments)
    assert slots is not None
    taken = stack[len(stack) - needed // page :]
    assert slots.tolist() == slow_extend(taken, page, old_lens, new_lens, last_slots)


@pytest.mark.parametrize("page", [1, 4])
def test_quarantined_pages_are_int32_even_when_empty(page: int) -> None:
    allocator = Allocator(8 * page, page, check=True)
    assert allocator.quarantined_pages().dtype == np.int32 and len(allocator.quarantined_pages()) == 0
    slots = allocator.alloc_extend(int32(0), int32(2 * page), int32(0))
    assert slots is not None
    allocator.quarantine(slots, [allocator.fences.open_fence()])
    assert allocator.quarantined_pages().dtype == np.int32 and sorted(allocator.quarantined_pages()) == [7, 8]


def test_double_free_error_names_pages() -> None:
    allocator = Allocator(8, check=True)
    slots = allocator.alloc_extend(int32(0), int32(4), int32(0))
    assert slots is not None
    with pytest.raises(DoubleFreeError, match=rf"pages freed twice: \[{slots[1]}\] \(1 in all\)"):
        allocator.free(slots[[1, 2, 1]])
    assert allocator.free_tokens == 4


def test_last_slots_are_ignored_at_page_boundaries() -> None:
    allocator = Allocator(64, 16, check=True)
    slots = allocator.alloc_extend(int32(16, 0), int32(18, 3), int32(-5, -5))
    assert slots is not None
    assert slots.tolist() == [48, 49, 64, 65, 66]


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_batch_allocation_is_all_or_nothing(page: int) -> None:
    allocator = Allocator(4 * page, page, check=True)
    before = allocator.free_pages().tolist()
    assert allocator.alloc_extend(int32(0, 0), int32(2 * page, 2 * page + 1), int32(0, 0)) is None
    assert allocator.free_pages().tolist() == before
    slots = allocator.alloc_extend(int32(0, 0), int32(2 * page, 2 * page), int32(0, 0))
    assert slots is not None


def test_shrinking_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be below old_lens"):
        Allocator(8).alloc_extend(int32(4), int32(2), int32(1))


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_free_releases_every_touched_page(page: int) -> None:
    allocator = Allocator(8 * page, page, check=True)
    length = 2 * page + 1
    slots = allocator.alloc_extend(int32(0), int32(length), int32(0))
    assert slots is not None
    assert allocator.free_tokens == 5 * page
    allocator.free(slots)
    assert allocator.free_tokens == 8 * page


@pytest.mark.parametrize("page", PAGE_SIZES)
def test_freed_pages_are_reused_in_order(page: int) -> None:
    allocator = Allocator(8 * page, page, check=True)
    first = allocator.alloc_extend(int32(0), int32(3 * page), int32(0))
    assert first is not None
    allocator.free(first)
    again = allocator.alloc_extend(int32(0), int32(3 * page), int32(0))
    assert again is not None
    assert again.tolist() == first.tolist()


def test_caller_may_modify_returned_slots() -> None:
    allocator = Allocator(8)
    slots = allocator.alloc_extend(int32(0), int32(3), int32(0))
    assert slots is not None
    kept = slots.tolist()
    allocator.free(slots)
    slots[:] = 0
    again = allocator.alloc_extend(int32(0), int32(3), int32(0))
    assert again is not None
    assert again.tolist() == kept


@pytest.mark.parametrize("page", PAGE_SIZES)
class TestQuarantine:
    def test_quarantined_pages_are_released_after_all_fences_close(self, page: int) -> None:
        allocator = Allocator(8 * page, page, check=True)
        fences = allocator.fences
        slots = allocator.alloc_extend(int32(0, 0, 0), int32(page, 2 * page, page), int32(0, 0, 0))
        assert slots is not None
        step, copy, never = fences.open_fence(), fences.open_fence(), fences.open_fence()
        allocator.quarantine(slots[:page], [step])
        allocator.quarantine(slots[page : 3 * page], [step, copy])
        allocator.quarantine(slots[3 * page :], [never])
        assert allocator.quarantined_tokens == 4 * page
        assert allocator.free_tokens == 4 * page
        assert len(allocator.quarantined_pages()) == 4
        assert allocator.release_quarantine() == 0
        fences.close_fence(copy)
        assert allocator.release_quarantine() == 0, "the step still writes"
        fences.close_fence(step)
        assert allocator.release_quarantine() == 3 * page
        assert allocator.quarantined_tokens == page
        assert allocator.free_tokens == 7 * page
        assert allocator.release_quarantine() == 0
        fences.close_fence(never)
        assert allocator.release_quarantine() == page
        assert allocator.free_tokens == 8 * page
        assert sorted(allocator.free_pages().tolist()) == list(range(1, 9))

    def test_closed_fence_quarantines_nothing(self, page: int) -> None:
        allocator = Allocator(2 * page, page, check=True)
        slots = allocator.alloc_extend(int32(0), int32(page), int32(0))
        assert slots is not None
        ended = allocator.fences.open_fence()
        allocator.fences.close_fence(ended)
        allocator.quarantine(slots, [ended])
        assert allocator.free_tokens == 2 * page and allocator.quarantined_tokens == 0

    def test_two_pools_share_the_fences_of_a_copy(self, page: int) -> None:
        device = Allocator(2 * page, page, check=True)
        host = Allocator(2 * page, page, fences=device.fences, check=True)
        copy = device.fences.open_fence()
        for pool in (device, host):
            slots = pool.alloc_extend(int32(0), int32(page), int32(0))
            assert slots is not None
            pool.quarantine(slots, [copy])
        device.fences.close_fence(copy)
        assert device.release_quarantine() == host.release_quarantine() == page

    def test_quarantine_copies_callers_array(self, page: int) -> None:
        allocator = Allocator(8 * page, page, check=True)
        slots = allocator.alloc_extend(int32(0), int32(page), int32(0))
        assert slots is not None
        fence = allocator.fences.open_fence()
        allocator.quarantine(slots, [fence])
        slots[:] = 0
        allocator.fences.close_fence(fence)
        allocator.release_quarantine()
        assert sorted(allocator.free_pages().tolist()) == list(range(1, 9))

    def test_quarantined_pages_are_not_allocated_or_freed(self, page: int) -> None:
        allocator = Allocator(2 * page, page, check=True)
        slots = allocator.alloc_extend(int32(0), int32(2 * page), int32(0))
        assert slots is not None
        allocator.quarantine(slots, [allocator.fences.open_fence()])
        assert allocator.alloc_extend(int32(0), int32(1), int32(0)) is None
        with pytest.raises(DoubleFreeError):
            allocator.free(slots[:page])

    def test_reset_frees_quarantined_pages(self, page: int) -> None:
        allocator = Allocator(2 * page, page, check=True)
        slots = allocator.alloc_extend(int32(0), int32(2 * page), int32(0))
        assert slots is not None
        fence = allocator.fences.open_fence()
        allocator.quarantine(slots[:page], [fence])
        allocator.reset()
        assert allocator.free_tokens == 2 * page
        assert allocator.quarantined_tokens == 0
        allocator.fences.close_fence(fence)
        assert allocator.release_quarantine() == 0


@pytest.mark.parametrize("page", PAGE_SIZES)
class TestDoubleFree:
    def test_double_free_across_calls_is_refused(self, page: int) -> None:
        allocator = Allocator(4 * page, page, check=True)
        slots = allocator.alloc_extend(int32(0), int32(2 * page), int32(0))
        assert slots is not None
        allocator.free(slots[page:])
        with pytest.raises(DoubleFreeError, match="freed twice"):
            allocator.free(slots)
        assert allocator.free_tokens == 3 * page  # the wrong call changed nothing

    def test_double_free_in_one_call_is_refused(self, page: int) -> None:
        allocator = Allocator(4 * page, page, check=True)
        slots = allocator.alloc_extend(int32(0), int32(2 * page), int32(0))
        assert slots is not None
        with pytest.raises(DoubleFreeError, match="freed twice"):
            allocator.free(np.concatenate([slots, slots[:page]]))

    def test_freeing_padding_or_foreign_page_is_refused(self, page: int) -> None:
        allocator = Allocator(4 * page, page, check=True)
        allocator.alloc_extend(int32(0), int32(4 * page), int32(0))
        for slot in (0, 5 * page):
            with pytest.raises(DoubleFreeError, match="outside"):
                allocator.free(int32(slot))

    def test_free_list_overflow_is_refused_without_checks(self, page: int) -> None:
        allocator = Allocator(4 * page, page)
        with pytest.raises(DoubleFreeError, match="5 free of 4"):
            allocator.free(int32(page))


@pytest.mark.parametrize(
    ("tokens", "page", "message"),
    [
        (48, 3, "power of two"),
        (48, 0, "power of two"),
        (0, 1, "positive multiple"),
        (40, 16, "positive multiple of page_size 16, not 40"),
        (2**31, 1, "does not fit int32"),
    ],
)
def test_invalid_pool_sizes_are_refused(tokens: int, page: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Allocator(tokens, page)


@pytest.mark.parametrize("seed", range(12))
def test_random_sequences_never_share_a_page(seed: int) -> None:
    rng = random.Random(seed)
    page = rng.choice(PAGE_SIZES)
    allocator = Allocator(40 * page, page, check=True)
    sequences: list[list[int]] = []
    in_flight: list[int] = []
    for _ in range(200):
        action = rng.random()
        if action < 0.6:  # extend a random batch, new sequences included
            batch = rng.sample(sequences, min(len(sequences), rng.randrange(4)))
            batch += [[] for _ in range(rng.randrange(2))]
            old = int32(*(len(s) for s in batch))
            new = old + int32(*(rng.randrange(3 * page + 1) for _ in batch))
            last = int32(*(s[-1] if s else 0 for s in batch))
            slots = allocator.alloc_extend(old, new, last)
            if slots is not None:
                parts = np.split(slots, np.cumsum(new - old)[:-1]) if batch else []
                for sequence, part in zip(batch, parts):
                    if not sequence and len(part):
                        sequences.append(sequence)
                    sequence.extend(part.tolist())
        elif sequences:
            sequence = sequences.pop(rng.randrange(len(sequences)))
            if action < 0.8:
                allocator.free(int32(*sequence))
            else:
                in_flight.append(allocator.fences.open_fence())
                allocator.quarantine(int32(*sequence), rng.sample(in_flight, min(2, len(in_flight))))
        if len(in_flight) > 3:
            allocator.fences.close_fence(in_flight.pop(rng.randrange(len(in_flight))))
            allocator.release_quarantine()
        owned = [slot // page for s in sequences for slot in s[::page]]
        owned += allocator.free_pages().tolist() + allocator.quarantined_pages().tolist()
        assert sorted(owned) == list(range(1, 41)), f"seed {seed}"
        for sequence in sequences:
            assert all(slot % page == i % page for i, slot in enumerate(sequence)), f"seed {seed}"
