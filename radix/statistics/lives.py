"""How long KV stays in the cache, how long it rests there, and what becomes of it.

             stored                    used                       used                          evicted
    ───────────┼────────────────────────┼──────────────────────────┼───────────────────────────────┼──▶ seconds
               │ ◀───── reuse gap ────▶ │ ◀────── reuse gap ─────▶ │ ◀──────── idle time ────────▶ │
               │ ◀──────────────────────────── lifetime ─────────────────────────────────────────▶ │

A time counts once for each token it concerns: of a node that is evicted its tokens, of a path that is found again all
its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cache import RadixCache
from ..node import TreeNode
from .ghosts import Ghosts
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
        self.ghosts = Ghosts(cache.allocator.total_tokens, cache.page_size)
        self._ghosts_below = self.ghosts.parents
        self._now = self._note_at = 0.0
        self._ends: list[float] = []
        """Of each evicted node: ticks at which it was stored and used, seconds now, tokens."""
        self._uses: list[float] = []
        """Of each path found again: tick at which it was used before, seconds now, tokens."""
        self._lifetime, self._idle_time, self._reuse_gap = Spread(SECONDS), Spread(SECONDS), Spread(SECONDS)
        self.evicted_tokens = 0
        self.evicted_nodes = 0
        self.retired_tokens = 0
        """Evicted, of which somebody had said that nobody would come back for them."""
        self.to_host_tokens = 0
        """Evicted, with a copy on the host."""
        self.given_up_tokens = 0
        """Left the device because all was forgotten, or because they could not be trusted."""
        self.cleared_at = float("-inf")
        """When all was forgotten."""
        self._tokens_before = self._tokens_in_tree
        self.advance(0.0)
        cache.watchers.add(self)

    def advance(self, now: float) -> None:
        """What happens from here on, happens now. Seconds, which never go back."""
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
            return  # nothing was found; or a store had it, and nobody knows since when
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
            if node.turn:  # else a store had it
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
        """Of paths that sequences begin with: since one last began or ended there."""
        self._count_times()
        return self._reuse_gap

    def _count_times(self) -> None:
        if self._ends:
            born, used, now, tokens = np.array(self._ends, dtype=np.float64).reshape(-1, 4).T
            self._lifetime.add(now - self.times.seconds_at(born), tokens)
            self._idle_time.add(now - self.times.seconds_at(used), tokens)
            self._ends.clear()
        if self._uses:
            used, now, tokens = np.array(self._uses, dtype=np.float64).reshape(-1, 3).T
            self._reuse_gap.add(now - self.times.seconds_at(used), tokens)
            self._uses.clear()
