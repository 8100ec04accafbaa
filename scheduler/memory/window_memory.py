"""Slots of layers with a sliding window, where these have a pool of their own.

Each page that the KV pool hands out gets one of this pool beside it (`WindowedAllocator`), and sequences give those
behind their windows back. So all that is left to do is to see that there is room, and to tell steps where their tokens
are in this pool.
"""

from __future__ import annotations

from ...radix.cache import RadixCache
from ...radix.node_windows import NodeWindows
from ..batch import ScheduleBatch, WindowSlots
from .pending_copies import PendingCopies

LEAST_EVICTION = 1 / 32
"""Share of the pool that is evicted at a time, since all cached prefixes are ranked anew each time."""


class WindowMemory:
    """Finds room in the window pool. Owns nothing."""

    def __init__(self, cache: RadixCache, windows: NodeWindows, copies: PendingCopies, step_tokens: int) -> None:
        """step_tokens: the most that a step computes."""
        self._cache, self._pages, self._copies = cache, windows.pages, copies
        self._step_tokens = step_tokens
        self._least_eviction = int(LEAST_EVICTION * self._pages.total_tokens)

    @property
    def available_tokens(self) -> int:
        """Slots that are free, or that only the tree keeps."""
        return self._pages.free_tokens + self._pages.evictable_tokens

    def can_begin(self, matched: int, needed: int) -> bool:
        """True if a sequence that lacks ``needed`` tokens after ``matched`` others can have the slots of its next step,
        without breaking a lease."""
        held = matched - self._pages.first_needed(matched)  # evictable until the sequence holds them
        return self.can_continue(needed + held)

    def can_continue(self, needed: int) -> bool:
        """Likewise, for a sequence that holds its window."""
        page = self._pages.page_size
        return min(needed, self._step_tokens + self._pages.kept_tokens + page) <= self.available_tokens

    def make_room(self, needed: int, latest: int | None = None) -> bool:
        """Evict until ``needed`` slots are free, or nothing is left to evict. latest: only what was not used after this
        tick. True if they are free."""
        short = needed - self._pages.free_tokens
        if short > 0:
            self._cache.evict_windows(short if latest is not None else max(short, self._least_eviction), latest)
        return needed <= self._pages.free_tokens

    def plan_slots(self, batch: ScheduleBatch) -> WindowSlots:
        """What a step that is being formed reads and writes in the window pool."""
        slots_of = self._pages.slots_of
        return WindowSlots(
            out=slots_of(batch.out_cache_loc),
            updates=slots_of(batch.row_updates.values),
            copies=self._copies.taken_windows(),
        )
