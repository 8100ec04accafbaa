"""The rules of the book of copies that no step has made yet."""

from __future__ import annotations

import numpy as np
import pytest

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.radix.cache import RadixCache
from baton.radix.kv_sequence import KVSequence
from baton.scheduler.batch import KVCopies
from baton.scheduler.memory.pending_copies import PendingCopies
from tests.doubles.cache_rig import int32


class Book:
    """A book beside sequences of four tokens in the slots 10, 11, 12, 13 (row 0), 20, … (row 1) and so on."""

    def __init__(self) -> None:
        self.pool = ReqToTokenPool(4, 16)
        self._root = RadixCache(self.pool, Allocator(64, 1), page_size=1).tree.root
        self.copies = PendingCopies(self.pool)

    def sequence(self, row: int) -> KVSequence:
        self.pool.write(row, 0, np.arange(10 * row + 10, 10 * row + 14, dtype=np.int32))
        return KVSequence("", row, self._root, 0, 4)

    def take(self, *searches: KVSequence) -> list[tuple[int, int]]:
        """(source, target) of all copies of a step."""
        parts = self.copies.take_copies(searches)
        return [pair for part in parts for pair in zip(part.source.tolist(), part.target.tolist(), strict=True)]


@pytest.fixture
def book() -> Book:
    return Book()


def test_sequence_copies_are_taken_once_by_next_step(book: Book) -> None:
    first, second = book.sequence(0), book.sequence(1)
    book.copies.add_copies(first, int32(50, 51), int32(12, 13))
    book.copies.add_copies(second, int32(52), int32(23))
    assert book.take() == [(50, 12), (51, 13), (52, 23)]
    assert book.take() == [] and not book.copies.has_copies(first)


def test_beam_copies_wait_for_step_of_their_search(book: Book) -> None:
    search, other, plain = (book.sequence(row) for row in range(3))
    book.copies.add_beam_copies(search, KVCopies(int32(13), int32(60)))
    book.copies.add_beam_copies(other, KVCopies(int32(23), int32(61)))
    book.copies.add_copies(plain, int32(50), int32(33))
    assert book.take() == [(50, 33)]
    assert book.take(other) == [(23, 61)]
    assert book.copies.has_copies(search) and not book.copies.has_copies(other)
    assert book.take(search, other) == [(13, 60)]


@pytest.mark.parametrize("own_step", [False, True])
def test_copies_of_closed_sequence_are_dropped(book: Book, own_step: bool) -> None:
    closed = book.sequence(0)
    if own_step:
        book.copies.add_beam_copies(closed, KVCopies(int32(13), int32(60)))
    else:
        book.copies.add_copies(closed, int32(50), int32(13))
    closed.node = None
    assert book.take(closed) == []
    assert book.take(book.sequence(0)) == []


def test_copies_beyond_truncation_are_dropped(book: Book) -> None:
    cut = book.sequence(0)
    book.copies.add_copies(cut, int32(50, 51, 52), int32(11, 12, 13))
    cut.length = 3
    assert book.take() == [(50, 11), (51, 12)]


def test_later_row_change_replaces_pending_copies(book: Book) -> None:
    sequence = book.sequence(0)
    book.copies.add_copies(sequence, int32(50, 51), int32(12, 13))
    book.copies.add_copies(sequence, int32(52), int32(12))
    assert book.take() == [(52, 12)]


def test_pending_slots_are_copied_from_their_source(book: Book) -> None:
    sequence = book.sequence(0)
    book.copies.add_copies(sequence, int32(55, 51), int32(13, 11))
    assert book.copies.source_of(sequence, int32(10, 11, 12, 13)).tolist() == [10, 51, 12, 55]
    assert book.copies.source_of(book.sequence(1), int32(11, 13)).tolist() == [11, 13]
    book.take()
    assert book.copies.source_of(sequence, int32(11, 13)).tolist() == [11, 13]


def test_next_owner_of_row_does_not_inherit_its_copies(book: Book) -> None:
    before = book.sequence(0)
    book.copies.add_copies(before, int32(50), int32(13))
    after = book.sequence(0)
    assert book.copies.has_copies(before) and not book.copies.has_copies(after)
    book.copies.drop_copies(after)
    assert book.copies.has_copies(before)
    book.copies.drop_copies(before)
    assert book.take() == []


def test_clear_copies_drops_all(book: Book) -> None:
    sequence, search = book.sequence(0), book.sequence(1)
    book.copies.add_copies(sequence, int32(50), int32(13))
    book.copies.add_beam_copies(search, KVCopies(int32(23), int32(60)))
    book.copies.clear_copies()
    assert book.take(search) == []
