"""Keeps track of the slots of layers with a sliding window, which have a pool of their own.

A query of such a layer sees the last ``window`` tokens alone, so K and V further behind are of no use to it. A page of
the KV pool has a page of this pool beside it, or none: the mapping is by page, and rows and nodes of the tree name
slots of the KV pool alone. Whoever owns a page of the KV pool owns the one beside it too.

    handed out ──▶ beside a page that a sequence holds ──drop──▶ given back: behind the window
                        │                                  └──▶ beside a page of the tree that no sequence holds;
                        └── the page of the KV pool is freed       evicted when memory runs short
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .allocator import Allocator, DoubleFreeError
from .fences import Fences

MOST_SLACK = 64
"""Tokens: sequences keep up to so many more than the window, so that they can be cut back by a few."""


class WindowPages:
    """Owns the slots of the window pool, the mapping, and the number of sequences that hold each page.

    Pages are named by their numbers in the KV pool. Sequences hold only pages with one beside them.
    """

    def __init__(self, num_tokens: int, kv_tokens: int, page_size: int, window: int, *, check: bool = False) -> None:
        """num_tokens: usable slots, a multiple of page_size; a padding page comes on top. kv_tokens: those of the KV
        pool. window: tokens that a query sees at most, itself included. check: as for `Allocator`."""
        self._allocator = Allocator(num_tokens, page_size, check=check)
        self.page_size = page_size
        self.window = window
        self.slack = slack_of(window, page_size)
        """Tokens that a sequence keeps beyond the window; it gives back as many at a time."""
        self._shift = page_size.bit_length() - 1
        self.of_page = np.zeros((kv_tokens >> self._shift) + 1, dtype=np.int32)
        """int32 [pages + 1]: the first slot beside each page of the KV pool; 0 for none."""
        self.holders = np.zeros_like(self.of_page)
        """int32 [pages + 1]: sequences that hold each page, and the one that is not in the tree but owns it."""
        self._unheld = 0

    @property
    def total_tokens(self) -> int:
        return self._allocator.total_tokens

    @property
    def free_tokens(self) -> int:
        return self._allocator.free_tokens

    @property
    def evictable_tokens(self) -> int:
        """Slots beside pages of the tree that no sequence holds."""
        return self._unheld << self._shift

    @property
    def kept_tokens(self) -> int:
        """The most slots that a sequence keeps from one step to the next."""
        return self.window + 2 * self.slack + self.page_size

    def first_needed(self, length: int) -> int:
        """The first position that the token after ``length`` others sees, or its page."""
        first = max(0, length - self.window + 1)
        return first - first % self.page_size

    def first_kept(self, length: int) -> int:
        """The first position that a sequence of ``length`` tokens keeps; where a page begins."""
        first = max(0, length - self.window - self.slack)
        return first - first % self.page_size

    def slots_of(self, slots: np.ndarray) -> np.ndarray:
        """int32 [n], of the KV pool -> int32 [n], of this one; in the padding page where there is none."""
        if not self._shift:
            return self.of_page[slots]
        return self.of_page[slots >> self._shift] + (slots & (self.page_size - 1))

    def has(self, pages: np.ndarray) -> np.ndarray:
        """bool [n]: which of these pages have one beside them."""
        return self.of_page[pages] > 0

    # -- pages ---------------------------------------------------------------------------------------------------------

    def give(self, pages: np.ndarray) -> None:
        """Put free pages beside these, int32 [n], which one sequence owns. There are as many."""
        found = self._allocator.take_pages(len(pages))
        assert found is not None
        self.of_page[pages] = found
        self.holders[pages] = 1

    def take_back(self, pages: np.ndarray) -> int:
        """Free what is beside these pages, int32 [n], however it is held. Returns the tokens freed."""
        mapped = self.of_page[pages]
        if not mapped.all():
            pages, mapped = pages[mapped > 0], mapped[mapped > 0]
        if not len(pages):
            return 0
        self._unheld -= int(np.count_nonzero(self.holders[pages] == 0))
        self.of_page[pages] = self.holders[pages] = 0
        self._allocator.free(mapped)
        return len(pages) << self._shift

    def hold(self, pages: np.ndarray) -> None:
        """One more sequence holds these pages, int32 [n], each once. Raises DoubleFreeError for one with none beside
        it."""
        if not self.has(pages).all():
            raise DoubleFreeError(f"nothing is left beside the pages {pages[~self.has(pages)][:16].tolist()}")
        self._unheld -= int(np.count_nonzero(self.holders[pages] == 0))
        self.holders[pages] += 1

    def drop(self, pages: np.ndarray) -> None:
        """A sequence holds these pages of the tree, int32 [n], each once, no more."""
        if (self.holders[pages] < 1).any():
            raise DoubleFreeError(f"pages {pages[self.holders[pages] < 1][:16].tolist()} are held by none")
        self.holders[pages] -= 1
        self._unheld += int(np.count_nonzero(self.holders[pages] == 0))

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """What is beside pages of a sequence is beside these pages of the tree from now on, unless something is: they
        hold the same tokens. int32 [n] both. The sequence holds the targets then, and may free the sources."""
        is_bare = ~self.has(targets)
        gets, gives = targets[is_bare], sources[is_bare]
        self.of_page[gets], self.of_page[gives] = self.of_page[gives], 0
        self.holders[gives] = 0
        self.holders[gets] = 1
        self.hold(targets[~is_bare])

    # -- recovery ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Everything is free again."""
        self._allocator.reset()
        self.of_page[:] = self.holders[:] = self._unheld = 0

    def recount(self, free: np.ndarray, held: Sequence[np.ndarray], leaving: np.ndarray) -> None:
        """Derive everything from the mapping. free: int32 [n], free pages of the KV pool, which have none beside them.
        held: int32 [n] for each holder, its pages; those with none beside them are not held. leaving: int32 [n], pages
        in quarantine."""
        self.of_page[free] = self.of_page[0] = 0
        self.holders[:] = self.count_holders(held, leaving)
        self.holders[self.of_page == 0] = 0
        mapped = self.of_page[self.of_page > 0]
        self._allocator.rebuild(mapped, [])
        self._unheld = int(np.count_nonzero((self.of_page > 0) & (self.holders == 0)))

    # -- inspection ----------------------------------------------------------------------------------------------------

    @property
    def adds_up(self) -> bool:
        """True if every slot is free or beside one page, and those that no sequence holds are as many as is counted."""
        unheld = int(np.count_nonzero((self.of_page > 0) & (self.holders == 0)))
        return unheld == self._unheld and bool((self._owners() == 1).all())

    @property
    def lost_tokens(self) -> int:
        """Slots that are neither free nor beside a page."""
        return int(np.count_nonzero(self._owners() == 0)) << self._shift

    def count_holders(self, held: Sequence[np.ndarray], leaving: np.ndarray) -> np.ndarray:
        """int32 [pages + 1]: how often each page is held; see `recount`."""
        counts = np.zeros_like(self.holders)
        for pages in held:
            counts[pages] += 1
        counts[leaving] += self.has(leaving)
        return counts

    @property
    def has_doubled(self) -> bool:
        """True if a page is beside two others, or free too."""
        return bool((self._owners() > 1).any())

    def _owners(self) -> np.ndarray:
        """int64 [pages of this pool]: how often each is beside a page, or free."""
        pages = np.concatenate([self.of_page[self.of_page > 0] >> self._shift, self.free_pages()])
        return np.bincount(pages, minlength=(self.total_tokens >> self._shift) + 1)[1:]

    def free_pages(self) -> np.ndarray:
        """int32 [n]: the numbers of this pool's free pages, for invariants and dumps."""
        return self._allocator.free_pages()

    def free_slots(self) -> np.ndarray:
        """int32 [n]: the slots of these."""
        first = self.free_pages()[:, None] << self._shift
        return (first + np.arange(self.page_size, dtype=np.int32)).ravel()


class WindowedAllocator(Allocator):
    """An allocator of the KV pool that puts a page of the window pool beside each page that it hands out, and takes it
    back with the page. A page in quarantine keeps its own."""

    def __init__(
        self, windows: WindowPages, num_tokens: int, *, fences: Fences | None = None, check: bool = False
    ) -> None:
        self.windows = windows
        super().__init__(num_tokens, windows.page_size, fences=fences, check=check)

    @property
    def spare_tokens(self) -> int:
        """See Allocator.spare_tokens."""
        return min(self.free_tokens, self.windows.free_tokens)

    def room_beside(self, shared: int) -> int:
        """See Allocator.room_beside."""
        windows = self.windows
        return min(super().room_beside(shared), windows.total_tokens - min(shared, windows.kept_tokens))

    def reset(self, in_use: Sequence[tuple[int, np.ndarray]] = ()) -> None:
        """See Allocator.reset."""
        super().reset(in_use)
        self.windows.reset()

    def take_pages(self, count: int) -> np.ndarray | None:
        """See Allocator.take_pages."""
        if count << self._shift > self.windows.free_tokens:
            return None
        pages = super().take_pages(count)
        if pages is not None:
            self.windows.give(pages >> self._shift)
        return pages

    def _extend_one(self, old: int, new: int, last: int) -> np.ndarray | None:
        count = -(-new >> self._shift) + (-old >> self._shift)
        if count << self._shift > self.windows.free_tokens:
            return None
        slots = super()._extend_one(old, new, last)
        if slots is not None:
            self.windows.give(self._stack[self._top : self._top + count] >> self._shift)
        return slots

    def _push(self, pages: np.ndarray, *, marked: bool = False) -> None:
        super()._push(pages, marked=marked)
        self.windows.take_back(pages >> self._shift)


def slack_of(window: int, page_size: int) -> int:
    """Tokens that a sequence keeps beyond the window."""
    return max(page_size, min(MOST_SLACK, window // 4))


def least_tokens(window: int, page_size: int, chunk: int) -> int:
    """The fewest slots with which a request can run alone, ``chunk`` tokens at a time; whole pages."""
    least = window + 2 * slack_of(window, page_size) + chunk + 2 * page_size
    return -(-least // page_size) * page_size
