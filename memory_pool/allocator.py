"""Keeps track of the free slots of the KV pool.

A slot holds the K and V of one token; a page is ``page_size`` consecutive slots and is given out whole. Page p covers
slots p * page_size … (p + 1) * page_size - 1; page 0 is padding and never leaves the allocator.

The free list is a stack of pages in one array with a cursor, so that neither alloc nor free ever copies the list. Last
in, first out: what was freed last is the warmest, and a pool that is never full touches little memory. A page stands
there by its first slot, which is what nodes and rows know of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .fences import Fences


class DoubleFreeError(RuntimeError):
    """A page was given back that was free already, or was never handed out: two owners believed they held it."""


class Allocator:
    """Owns the free slots. Pure bookkeeping: the KV tensors are elsewhere.

    num_tokens: usable slots, a multiple of page_size, padding excluded (the KV tensors need num_tokens + page_size).
    page_size: 1, 16, 64 or any other power of two, in tokens.
    fences: the operations that may still touch slots which are given back; None: a set of its own.
    check: verify every call against a table of pages (raises DoubleFreeError); for tests, it costs a gather per call.
    """

    def __init__(
        self, num_tokens: int, page_size: int = 1, *, fences: Fences | None = None, check: bool = False
    ) -> None:
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page_size must be a power of two (1, 16, 64, …), not {page_size}")
        if num_tokens < page_size or num_tokens % page_size:
            raise ValueError(f"num_tokens must be a positive multiple of page_size {page_size}, not {num_tokens}")
        if num_tokens + page_size > 2**31:
            raise ValueError(f"num_tokens {num_tokens} does not fit int32 slot numbers; use fewer tokens")
        self.page_size = page_size
        self.fences = fences if fences is not None else Fences()
        self.total_tokens = num_tokens
        self._shift = page_size.bit_length() - 1
        self._num_pages = num_tokens >> self._shift
        self._check = check
        self._offsets = np.arange(page_size, dtype=np.int32)
        self.reset()

    def reset(self, in_use: Sequence[tuple[int, np.ndarray]] = ()) -> None:
        """Everything is free again, quarantine included. The caller forgets every slot it holds.

        in_use: (fence, slots) of operations still running; their pages come back when all these fences are closed.
        """
        going_on = [(fence, self._pages_of(slots)) for fence, slots in in_use if self.fences.is_open(fence)]
        kept: list[tuple[tuple[int, ...], np.ndarray]] = []
        if going_on:  # several of them may read one page
            fences, pages = zip(*going_on, strict=True)
            kept.append((tuple(fences), np.unique(np.concatenate(pages))))
        is_free = np.ones(self._num_pages + 1, dtype=bool)
        is_free[0] = False
        for _, pages in kept:
            is_free[pages >> self._shift] = False
        free = np.flatnonzero(is_free).astype(np.int32)
        self._stack = np.zeros(self._num_pages + 1, dtype=np.int32)
        """Below the first page is a place for `_extend_one`."""
        self._stack[1 : len(free) + 1] = free << self._shift
        self._top = 1 + len(free)
        self._quarantine = kept
        """(fences, pages) of what was given back and is still in use."""
        self._quarantined_pages = self._num_pages - len(free)
        self._given_back = np.ones(self._num_pages + 1, dtype=bool) if self._check else None

    def rebuild(self, owned: np.ndarray, fences: Sequence[int]) -> int:
        """Make every page free that is neither among ``owned`` (int32 [n], slots) nor in quarantine. Pages that were
        nowhere wait for ``fences``, which may still write them. Returns the tokens of these.

        Used after an exception, when an owner may have been lost.
        """
        taken = np.zeros(self._num_pages + 1, dtype=bool)
        taken[0] = True
        taken[owned >> self._shift] = True
        is_owned, was_free = taken.copy(), np.zeros_like(taken)
        was_free[self._stack[1 : self._top] >> self._shift] = True
        kept: list[tuple[tuple[int, ...], np.ndarray]] = []
        for waits_for, pages in self._quarantine:
            pages = pages[~taken[pages >> self._shift]]
            if len(pages) and any(map(self.fences.is_open, waits_for)):
                kept.append((waits_for, pages))
                taken[pages >> self._shift] = True
        lost = np.flatnonzero(~taken & ~was_free).astype(np.int32)
        still_written = tuple(fence for fence in fences if self.fences.is_open(fence))
        if len(lost) and still_written:
            kept.append((still_written, lost << self._shift))
            taken[lost] = True
        free = np.flatnonzero(~taken).astype(np.int32)
        self._stack[1 : len(free) + 1] = free << self._shift
        self._top = 1 + len(free)
        self._quarantine, self._quarantined_pages = kept, sum(len(pages) for _, pages in kept)
        if self._given_back is not None:
            self._given_back = ~is_owned
        return len(lost) << self._shift

    @property
    def free_tokens(self) -> int:
        return self._top - 1 << self._shift

    @property
    def spare_tokens(self) -> int:
        """Tokens that `alloc_extend` can hand out; whole pages."""
        return self.free_tokens

    def room_beside(self, shared: int) -> int:
        """Tokens that branches of one prefix, of ``shared`` tokens, can have for themselves, with nothing else in the
        pool."""
        return self.total_tokens - shared

    @property
    def quarantined_tokens(self) -> int:
        """Tokens given back that are not free yet, because a step or a copy in flight still touches them."""
        return self._quarantined_pages << self._shift

    # -- out ---------------------------------------------------------------------------------------------------------

    def tokens_needed(self, old_lens: np.ndarray, new_lens: np.ndarray) -> int:
        """Tokens, in whole pages, that `alloc_extend` would take from the free list."""
        shift = self._shift
        if shift == 0:
            return _total(new_lens - old_lens)
        if len(new_lens) == 1:
            return (-(-new_lens.item() >> shift) + (-old_lens.item() >> shift)) << shift
        up = self.page_size - 1
        return _total(((new_lens + up) >> shift) - ((old_lens + up) >> shift)) << shift

    def alloc_extend(self, old_lens: np.ndarray, new_lens: np.ndarray, last_slots: np.ndarray) -> np.ndarray | None:
        """Slots for tokens old_lens[i] … new_lens[i] - 1 of each sequence, sequence after sequence.

        old_lens, new_lens: int32 [bs], old <= new. last_slots: int32 [bs], slot of token old - 1; ignored where old
        is a multiple of the page size. A partial last page is filled first, then whole new pages are taken.
        Returns int32 [sum(new - old)], or None, and nothing changed, if there are not enough free pages.
        """
        shift = self._shift
        if shift == 0:
            return self.take_pages(_total(new_lens - old_lens))
        if len(new_lens) == 1:
            return self._extend_one(old_lens.item(), new_lens.item(), last_slots.item())
        counts = new_lens - old_lens
        if (counts == 1).all():
            return self._extend_by_one(old_lens, last_slots)
        up = self.page_size - 1
        pages_before = (old_lens + up) >> shift
        page_counts = ((new_lens + up) >> shift) - pages_before
        pages = self.take_pages(_total(page_counts))
        if pages is None:
            return None
        starts = np.cumsum(counts) - counts
        # Tokens that still fit the partial last page; all others come, in order, from the new pages.
        heads = np.minimum(counts, (pages_before << shift) - old_lens)
        slots_of_pages = (pages[:, None] | self._offsets).ravel()
        out = np.empty(int(counts.sum()), dtype=np.int32)
        if len(pages):
            first_page_slot = (np.cumsum(page_counts) - page_counts) << shift
            source = np.repeat(first_page_slot - heads - starts, counts)
            source += np.arange(len(out))
            slots_of_pages.take(source, mode="clip", out=out)  # clip: head tokens read nonsense, overwritten below
        num_heads = int(heads.sum())
        if num_heads:
            within = np.arange(num_heads) - np.repeat(np.cumsum(heads) - heads, heads)
            out[np.repeat(starts, heads) + within] = np.repeat(last_slots + 1, heads) + within
        return out

    def _extend_one(self, old: int, new: int, last: int) -> np.ndarray | None:
        """`alloc_extend` of a single sequence, as in most prefills: a slice of whole pages, with the partial last page
        before the new ones."""
        shift, page, stack = self._shift, self.page_size, self._stack
        count = -(-new >> shift) + (-old >> shift)
        end, top = self._top, self._top - count
        if top < 1:
            return None
        if count < 0:
            raise _shrinks(count)
        self._top = top
        if self._given_back is not None:
            self._given_back[stack[top:end] >> shift] = False
        if not (filled := old & (page - 1)):
            return (stack[top:end, None] | self._offsets).reshape(-1)[: new - old]
        below = stack[top - 1]
        stack[top - 1] = last & -page  # for now, so that its slots come with the others'
        slots = (stack[top - 1 : end, None] | self._offsets).reshape(-1)[filled : filled + new - old]
        stack[top - 1] = below
        return slots

    def _extend_by_one(self, old_lens: np.ndarray, last_slots: np.ndarray) -> np.ndarray | None:
        """`alloc_extend` by one token each, as in a decode step: the same result in a few operations on [bs]."""
        needs_page = (old_lens & (self.page_size - 1)) == 0
        pages = self.take_pages(int(np.count_nonzero(needs_page)))
        if pages is None:
            return None
        slots = last_slots + 1
        slots[needs_page] = pages
        return slots

    def take_pages(self, count: int) -> np.ndarray | None:
        """The first slots of so many whole pages, int32 [count]; None, and nothing changed, if fewer are free."""
        top = self._top - count
        if top < 1:
            return None
        if count < 0:
            raise _shrinks(count)
        pages = self._stack[top : self._top].copy()
        self._top = top
        if self._given_back is not None:
            self._given_back[pages >> self._shift] = False
        return pages

    # -- back --------------------------------------------------------------------------------------------------------

    def free(self, slots: np.ndarray) -> None:
        """Give back every page that ``slots`` (int32 [n]) touch. The caller owns these pages whole.

        Slots of one page must stand next to each other, as they do in a row or a tree node.
        """
        self._push(self._pages_of(slots))

    def free_run(self, slots: np.ndarray) -> None:
        """As `free`, quicker: for pages one after the other from their first slots on, the last perhaps in part."""
        self._push(slots[:: self.page_size] if self._shift else slots)

    def quarantine(self, slots: np.ndarray, fences: Sequence[int]) -> None:
        """Like `free`, but the pages come back only with the first `release_quarantine` after all fences are closed: at
        once if none is open."""
        if not any(map(self.fences.is_open, fences)):
            self.free(slots)
            return
        pages = self._pages_of(slots)
        if len(pages) == 0:
            return
        self._mark_given_back(pages)
        self._quarantine.append((tuple(fences), pages.copy()))
        self._quarantined_pages += len(pages)

    def release_quarantine(self) -> int:
        """Free what waits for closed fences only; call it when a fence has been closed. Returns the tokens freed."""
        if not self._quarantine:
            return 0
        waiting: list[tuple[tuple[int, ...], np.ndarray]] = []
        count = 0
        for fences, pages in self._quarantine:
            if any(map(self.fences.is_open, fences)):
                waiting.append((fences, pages))
            else:
                self._push(pages, marked=True)
                count += len(pages)
        self._quarantine = waiting
        self._quarantined_pages -= count
        return count << self._shift

    def _pages_of(self, slots: np.ndarray) -> np.ndarray:
        """The first slots of the pages that these touch."""
        if self._shift == 0:
            return slots
        pages = slots & -self.page_size
        first_of_page = np.ones(len(pages), dtype=bool)
        np.not_equal(pages[1:], pages[:-1], out=first_of_page[1:])
        return pages[first_of_page]

    def _push(self, pages: np.ndarray, *, marked: bool = False) -> None:
        """marked: `_mark_given_back` knows of them."""
        if self._given_back is not None and not marked:
            self._mark_given_back(pages)
        end = self._top + len(pages)
        if end > self._num_pages + 1:
            free = f"{end - 1} free of {self._num_pages} in all"
            raise DoubleFreeError(f"freeing {len(pages)} pages makes {free}; some page was freed twice")
        self._stack[self._top : end] = pages
        self._top = end

    def _mark_given_back(self, pages: np.ndarray) -> None:
        if self._given_back is None:
            return
        unique, counts = np.unique(pages >> self._shift, return_counts=True)
        if len(unique) and not 0 < unique[0] <= unique[-1] <= self._num_pages:
            raise DoubleFreeError(f"pages outside 1 … {self._num_pages} were freed: {unique[[0, -1]].tolist()}")
        wrong = unique[self._given_back[unique] | (counts > 1)]
        if len(wrong):
            raise DoubleFreeError(f"pages freed twice: {wrong[:16].tolist()} ({len(wrong)} in all)")
        self._given_back[unique] = True

    # -- inspection --------------------------------------------------------------------------------------------------

    def free_pages(self) -> np.ndarray:
        """int32 [n]: the numbers of the pages in the free list, for invariants and dumps."""
        return self._stack[1 : self._top] >> self._shift

    def quarantined_pages(self) -> np.ndarray:
        """int32 [n]: the numbers of the pages in quarantine, for invariants and dumps."""
        return np.concatenate([np.empty(0, dtype=np.int32), *(pages for _, pages in self._quarantine)]) >> self._shift


def _total(counts: np.ndarray) -> int:
    """Sum of counts; for the few sequences of a prefill Python is faster than numpy's reduce."""
    return sum(counts.tolist()) if len(counts) < 32 else int(counts.sum())


def _shrinks(pages: int) -> ValueError:
    return ValueError(f"new_lens must not be below old_lens; together they ask for {pages} pages")
