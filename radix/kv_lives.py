"""How long KV stays in the cache, how long it is idle there, how it leaves, and how much of it left too early.

             stored                    used                       used                          evicted
    ───────────┼────────────────────────┼──────────────────────────┼───────────────────────────────┼──▶ seconds
               │ ◀───── reuse gap ────▶ │ ◀────── reuse gap ─────▶ │ ◀──────── idle time ────────▶ │
               │ ◀──────────────────────────── lifetime ─────────────────────────────────────────▶ │

A time counts once per token: for all tokens of an evicted node, or of a path that is found again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .cache import RadixCache
from .node import ID_BYTES, TreeNode
from .tick_times import FINEST_S, TickTimes
from .tree import common_prefix

SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds, for times that KV stays or rests."""

SAMPLED = 8
"""A sample has this part of the pool's tokens."""

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
        self._lifetime, self._idle_time, self._reuse_gap = Histogram(SECONDS), Histogram(SECONDS), Histogram(SECONDS)
        self.evicted_tokens = 0
        self.evicted_nodes = 0
        self.retired_tokens = 0
        """Evicted, and marked as not reusable before (discarding.py)."""
        self.to_host_tokens = 0
        """Evicted, with a copy on the host."""
        self.given_up_tokens = 0
        """Left the device because all was forgotten, or because they could not be trusted."""
        self.cleared_at = float("-inf")
        """When all was forgotten."""
        self._tokens_before = self._tokens_in_tree
        self.set_time(0.0)
        cache.watchers.add_watcher(self)

    def set_time(self, now: float) -> None:
        """Set the time of all later events. now: seconds, never less than before."""
        self._now = now
        if now >= self._note_at:
            self.times.record_tick(self._cache.tick, now)
            self._note_at = now + FINEST_S

    # -- as a watcher -------------------------------------------------------------------------------------------------

    def node_stored(self, node: TreeNode) -> None:
        parent = node.parent
        if parent is not None and parent.serial in self._ghosts_below and node.host is None:
            self.ghosts.count_recomputed(node)

    def path_used(self, node: TreeNode, tick: int) -> None:
        if node.parent is None or (node.turn == 0 and node.used == node.born):
            return  # nothing was found, or it came from a store and its age is unknown
        self._uses += (node.used, self._now, node.prefix_len)
        if len(self._uses) >= 3 * MAX_NOTED:
            self._count_times()

    def nodes_removed(self, nodes: Sequence[TreeNode]) -> None:
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
                self.ghosts.record_evicted(node)
            if node.turn:  # otherwise it came from a store
                ends += (node.born, node.used, now, tokens)
        self.evicted_tokens += evicted
        if self.evicted_tokens >= self.ghosts.next_at:
            self.ghosts.switch_phase(self.evicted_tokens)
        if len(ends) >= 4 * MAX_NOTED:
            self._count_times()

    def cache_cleared(self) -> None:
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
    def lifetime(self) -> Histogram:
        """From when KV was first in the cache until it was evicted. What came back from the host has not begun anew."""
        self._count_times()
        return self._lifetime

    @property
    def idle_time(self) -> Histogram:
        """From when a sequence last began with it, or with what hung on it, until it was evicted."""
        self._count_times()
        return self._idle_time

    @property
    def reuse_gap(self) -> Histogram:
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


class GhostSample:
    """Ghosts of one tree, over a pool of ``pool_tokens``. The owner reports how much is evicted: see `next_at`."""

    MAX_GHOSTS = 1 << 14

    def __init__(self, pool_tokens: int, page_size: int) -> None:
        self._pool_tokens = pool_tokens
        self._page_bytes = page_size * ID_BYTES
        self._ghosts: dict[tuple[int, object], tuple[int, bytes]] = {}
        """(serial of the node above, key there) -> (serial, tokens)"""
        self.parents: set[int] = set()
        """Nodes below which there are ghosts, or were."""
        self.recording = True
        self.next_at = pool_tokens // SAMPLED
        """Call `switch_phase` once so many tokens have been evicted in all."""
        self.recorded_tokens = 0
        self.recomputed_tokens = 0

    def __len__(self) -> int:
        return len(self._ghosts)

    def clear(self) -> None:
        """The tree is gone. What was recorded of it does not come back."""
        self._ghosts.clear()
        self.parents.clear()

    def switch_phase(self, evicted_tokens: int) -> None:
        """Stop recording, or begin the next sample."""
        self.recording = not self.recording
        if self.recording:
            self.clear()
        self.next_at = evicted_tokens + (self._pool_tokens // SAMPLED if self.recording else self._pool_tokens)

    def record_evicted(self, node: TreeNode) -> None:
        """A node leaves the cache; it is still in the tree."""
        if len(self._ghosts) >= self.MAX_GHOSTS:
            return
        parent = node.parent
        assert parent is not None
        self.recorded_tokens += len(node)
        self._put(parent.serial, node.child_key, node.serial, node.key)

    def count_recomputed(self, node: TreeNode) -> None:
        """A node is new in the tree, below one of ``parents``. Ghosts of its tokens are counted, and gone."""
        parent = node.parent
        assert parent is not None
        key, offset = node.key, 0
        ghost = self._ghosts.pop((parent.serial, node.child_key), None)
        while ghost is not None:
            serial, tokens = ghost
            if not key.startswith(tokens, offset):
                common = common_prefix(key, offset, tokens)
                common -= common % self._page_bytes
                offset += common
                if offset == len(key):  # the rest may come with the prompt's next chunk
                    rest = tokens[common:]
                    self._put(node.serial, rest[: self._page_bytes], serial, rest)
                break
            offset += len(tokens)
            ghost = self._ghosts.pop((serial, key[offset : offset + self._page_bytes]), None)
        self.recomputed_tokens += offset // ID_BYTES

    def _put(self, above: int, child_key: object, serial: int, tokens: bytes) -> None:
        self._ghosts[above, child_key] = serial, tokens
        self.parents.add(above)


class Histogram:
    """A histogram in the sense of Prometheus: counts weighted values by bucket. A value on a bound belongs
    below it; one more bucket is above all bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = np.array(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """Weights by bucket, not cumulative."""
        self.sum = 0.0
        """The sum of the values, each times its weight."""

    def add_values(self, values: np.ndarray, weights: np.ndarray) -> None:
        """values: float64 [n]. weights: whole numbers as float64 [n]."""
        buckets = np.searchsorted(self._bounds, values, side="left")
        added = np.bincount(buckets, weights=weights, minlength=len(self.counts))
        self.counts = [old + int(new) for old, new in zip(self.counts, added)]
        self.sum += float(values @ weights)
