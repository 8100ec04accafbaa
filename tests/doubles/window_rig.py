"""A cache rig for models with sliding windows in a pool of their own: each slot of that pool remembers which token it
holds, as each slot of the KV pool does."""

from __future__ import annotations

import numpy as np

from baton.memory_pool.window_pages import WindowedAllocator, WindowPages
from baton.radix.cuts import fork_sequence, truncate
from baton.radix.invariants import Account, check_windows
from baton.radix.node_windows import NodeWindows
from tests.doubles.cache_rig import CacheRig, Running


class WindowRig(CacheRig):
    """``windows`` slots for layers that see ``window`` tokens."""

    def __init__(self, num_tokens: int, page_size: int, rows: int, context: int, windows: int, window: int) -> None:
        super().__init__(num_tokens, page_size, rows, context)
        self.windows = WindowPages(windows, num_tokens, page_size, window, check=True)
        self.allocator = self.cache.allocator = WindowedAllocator(self.windows, num_tokens, check=True)
        self.nodes = self.cache.windows = NodeWindows(self.windows)
        self.seen: list[object] = [None] * (windows + page_size)
        """By slot of the window pool: what was computed there."""

    def extend(self, running: Running, length: int) -> bool:
        needed = self.allocator.tokens_needed(np.array([running.kv.length]), np.array([length]))
        self.cache.evict_windows(needed - self.windows.free_tokens)
        return super().extend(running, length)

    def compute(self, running: Running, length: int | None = None) -> bool:
        before = running.committed
        if not super().compute(running, length):
            return False
        slots = self.beside(running)
        for position in range(before, running.committed):
            self.seen[slots[position]] = self._content(running, position)
        self.cache.leave_window(running.kv, running.committed)
        return True

    def cut(self, running: Running, length: int, fence: int | None = None) -> None:
        """Go back to ``length`` tokens, or to where the window is whole."""
        truncate(self.cache, running.kv, length, fence=fence)
        running.committed = running.kv.length

    def fork(self, running: Running) -> Running | None:
        """A second sequence with all committed tokens; None if there is no room."""
        row = self.pool.alloc()
        assert row is not None
        forked = fork_sequence(self.cache, running.kv, running.committed, row)
        if forked is None:
            self.pool.free(row)
            return None
        kv, source, target = forked
        for slot, other in zip(source.tolist(), target.tolist()):
            self.kv[other] = self.kv[slot]
        for slot, other in zip(*(self.windows.slots_of(slots).tolist() for slots in (source, target))):
            self.seen[other] = self.seen[slot] if other >= self.windows.page_size else None
        fork = Running(kv, running.ids, running.committed)
        self.running.append(fork)
        return fork

    def beside(self, running: Running) -> np.ndarray:
        """int32 [n]: the slots in the window pool of a sequence's tokens."""
        return self.windows.slots_of(self.pool.rows[running.kv.row, : running.kv.length])

    def verify(self) -> Account:
        """Also that each sequence has the tokens there that its next one sees."""
        account = super().verify()
        check_windows(self.cache, [running.kv for running in self.running])
        for running in self.running:
            slots = self.beside(running)
            for position in range(max(0, running.committed - self.windows.window + 1), running.committed):
                assert self.seen[slots[position]] == self._content(running, position), (running, position)
        return account
