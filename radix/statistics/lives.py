"""How long KV stays in the cache, how long it is idle there, and how it leaves.

             stored                    used                       used                          evicted
    ───────────┼────────────────────────┼──────────────────────────┼───────────────────────────────┼──▶ seconds
               │ ◀───── reuse gap ────▶ │ ◀────── reuse gap ─────▶ │ ◀──────── idle time ────────▶ │
               │ ◀──────────────────────────── lifetime ─────────────────────────────────────────▶ │

A time counts once per token: for all tokens of an evicted node, or of a path that is found again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cache import RadixCache
from ..node import TreeNode
from .ghosts import GhostSample
from .spread import SECONDS, Spread
from .tick_times import FINEST_S, TickTimes

MAX_NOTED = 1024
"""Times that wait to be counted: many at once cost less."""


class KVLives:
    """Watches a cache from now on. Counts run since then, in tokens of the device."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self.times = TickTimes()
        """When the cache's ticks were."""
        self.ghosts = GhostSample(cache.allocator.total_tokens, cache.page_size)
        self._ghosts_below = self.ghosts.parents
        self._now = self._note_at = 0.0
        self._ends: list[float] = []
        """Per evicted node: ticks at which it was stored and used, seconds now, tokens."""
        self._uses: list[float] = []
        """Per path found again: tick at which it was used before, seconds now, tokens."""
        self._lifetime, self._idle_time, self._reuse_gap = Spread(SECONDS), Spread(SECONDS), Spread(SECONDS)
        self.evicted_tokens = 0
        self.evicted_nodes = 0
        self.retired_tokens = 0
        """Evicted, and marked as not reusable before (retire.py)."""
        self.to_host_tokens = 0
        """Evicted, with a copy on the host."""
        self.given_up_tokens = 0
        """Left the device because all was forgotten, or because they could not be trusted."""
        self.cleared_at = float("-inf")
        """When all was forgotten."""
        self._tokens_before = self._tokens_in_tree
        self.advance(0.0)
        cache.watchers.add_watcher(self)

    def advance(self, now: float) -> None:
        """Set the time of all later events. now: seconds, never less than before."""
        self._now = now
        if now >= self._note_at:
            self.times.note(self._cache.tick, now)
            self._note_at = now + FINEST_S

    # -- as a watcher -------------------------------------------------------------------------------------------------

    def stored(self, node: TreeNode) -> None:
        parent = node.parent
        if parent is not None and parent.serial in self._ghosts_below and node.host is None:
            self.ghosts.stored(node)

    def used(self, node: TreeNode, tick: int) -> None:
        if node.parent is None or (node.turn == 0 and node.used == node.born):
            return  # nothing was found, or it came from a store and its age is unknown
        self._uses += (node.used, self._now, node.prefix_len)
        if len(self._uses) >= 3 * MAX_NOTED:
            self._count_times()

    def removed(self, nodes: Sequence[TreeNode]) -> None:
        evicted, now, ends, recording = 0, self._now, self._ends, self.ghosts.recording
        for node in nodes:
            tokens = len(node.value)
            if node.on_device or not tokens:  # as victims of eviction are not
                self.given_up_tokens += tokens
                continue
            self.evicted_nodes += 1
            evicted += tokens
            if not node.last_access:
                self.retired_tokens += tokens
            if node.host is not None:
                self.to_host_tokens += tokens
            elif recording:
                self.ghosts.record(node)
            if node.turn:  # otherwise it came from a store
                ends += (node.born, node.used, now, tokens)
        self.evicted_tokens += evicted
        if self.evicted_tokens >= self.ghosts.next_at:
            self.ghosts.go_on(self.evicted_tokens)
        if len(ends) >= 4 * MAX_NOTED:
            self._count_times()

    def cleared(self) -> None:
        self.ghosts.clear()
        self.cleared_at = self._now
        self.given_up_tokens += self._tokens_in_tree

    @property
    def _tokens_in_tree(self) -> int:
        return self._cache.evictable_tokens + self._cache.protected_tokens

    @property
    def stored_tokens(self) -> int:
        """Put on the device: computed, or brought back from the host."""
        return self.evicted_tokens + self.given_up_tokens + self._tokens_in_tree - self._tokens_before

    # -- times --------------------------------------------------------------------------------------------------------

    @property
    def lifetime(self) -> Spread:
        """From when KV was first in the cache until it was evicted. What came back from the host has not begun anew."""
        self._count_times()
        return self._lifetime

    @property
    def idle_time(self) -> Spread:
        """From when a sequence last began with it, or with what hung on it, until it was evicted."""
        self._count_times()
        return self._idle_time

    @property
    def reuse_gap(self) -> Spread:
        """When a sequence begins with a path: the time since another one last began or ended there."""
        self._count_times()
        return self._reuse_gap

    def _count_times(self) -> None:
        if self._ends:
            born, used, now, tokens = np.array(self._ends, dtype=np.float64).reshape(-1, 4).T
            self._lifetime.add_values(now - self.times.seconds_at(born), tokens)
            self._idle_time.add_values(now - self.times.seconds_at(used), tokens)
            self._ends.clear()
        if self._uses:
            used, now, tokens = np.array(self._uses, dtype=np.float64).reshape(-1, 3).T
            self._reuse_gap.add_values(now - self.times.seconds_at(used), tokens)
            self._uses.clear()
