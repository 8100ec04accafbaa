"""Finds requests that had better wait a step, because the coming step computes a prefix that they share.

Two prompts share their first tokens if they end at, or pass, the same place in the tree. So where both are cached
nothing is compared, however long it is: only the page or pages behind a request's cached prefix, and what another one
still has to compute of it. The requests of the step are found by those pages.
"""

from __future__ import annotations

import numpy as np

from ...radix.cache import RadixCache
from ...radix.node import StateKind, TreeNode
from ..request import Request


class SharedPrefixes:
    """The prompts that the coming step computes, and those of a step in flight."""

    def __init__(self, cache: RadixCache, min_tokens: int) -> None:
        """min_tokens: a shorter shared piece is not worth a step."""
        self._cache = cache
        self._min_tokens = min_tokens
        self._added: list[Request] = []
        self._index: _Index | None = None
        """Index of the requests moved out of ``_added``; made on the first query, so never in a step of one request."""

    def add_request(self, request: Request) -> None:
        """Note a request that is being computed. One that has ended meanwhile will leave nothing to be found."""
        self._added.append(request)

    def will_be_cached(self, request: Request) -> bool:
        """True if an added request computes at least min_tokens tokens, in whole pages, that ``request`` needs and that
        are not cached yet. Remembers how far it found the prompt in the tree (``request.prefix_node``)."""
        if self._index is None:
            if not self._added:
                return False
            self._index = _Index(self._cache, max(1, self._min_tokens))
        for other in self._added:
            self._index.add_request(other)
        self._added.clear()
        return self._index.will_be_cached(request)


class _Index:
    """Finds added requests by pieces of their prompts."""

    def __init__(self, cache: RadixCache, min_tokens: int) -> None:
        self._cache = cache
        self._min_tokens = min_tokens
        self._window = -(-min_tokens // cache.page_size) * cache.page_size
        """Tokens behind the cached prefix that must agree: whole pages, as only those can be found."""
        self._by_head: dict[tuple[str, bytes], list[Request]] = {}
        self._by_window: dict[int, dict[tuple[str, bytes], list[Request]]] = {}
        """By the position of the window. Sorted in up to ``_sorted`` of ``_all``, at that position."""
        self._all: list[Request] = []
        self._sorted: dict[int, int] = {}

    def add_request(self, request: Request) -> None:
        if request.kv is not None:
            self._all.append(request)
            self._by_head.setdefault(self._head(request), []).append(request)

    def will_be_cached(self, request: Request) -> bool:
        limit = request.prefix_limit
        if limit < self._window or self._head(request) not in self._by_head:
            return False
        whole, cached, end = self._cache.find_prefix(
            request.namespace, request.token_ids.view(0, limit), after=request.prefix_node
        )
        request.prefix_node = whole
        states, windows = self._cache.states, self._cache.windows
        leaves = None
        if states is not None:
            end = states.deepest(whole)
            cached, leaves = end.prefix_len, self._leaves_state
        elif windows is not None:
            cached, leaves = windows.usable(end, cached), self._leaves_window
        if cached + self._window > limit:
            return False
        alike = self._at(cached).get(self._key(request, cached), ())
        shares = (other for other in alike if self._shares(request, end, cached, other))
        return any(shares) if leaves is None else any(leaves(other, request) for other in shares)

    def _leaves_state(self, other: Request, request: Request) -> bool:
        """Have the other leave its recurrent state where the two prompts part. False if it has passed that place."""
        point = self._parting(other, request)
        if point in other.state_points:
            other.state_points[point] = StateKind.BRANCH
            return True
        if point <= other.scheduled_len:
            states = other.held_kv.states
            held = states.of(point)
            if held is None or held.slot in states.targets:
                return False
        other.state_points[point] = StateKind.BRANCH
        return True

    def _leaves_window(self, other: Request, request: Request) -> bool:
        """Have the other leave its window where the two prompts part. False if it has passed that place, and the window
        there has gone."""
        point, kv, windows = self._parting(other, request), other.held_kv, self._cache.windows
        assert windows is not None
        if point <= kv.tree_len:
            return windows.usable(self._cache.tree.node_at(kv.open_node(), point), point) == point
        if windows.pages.first_needed(point) < kv.window_start:
            return False
        other.state_points[point] = StateKind.BRANCH
        return True

    def _parting(self, other: Request, request: Request) -> int:
        """The tokens that two prompts share, in whole pages."""
        mine, theirs = request.token_ids.view(0, request.prefix_limit), other.token_ids.view()
        length = min(len(mine), len(theirs))
        differing = np.flatnonzero(mine[:length] != theirs[:length])
        point = int(differing[0]) if len(differing) else length
        return point - point % self._cache.page_size

    def _head(self, request: Request) -> tuple[str, bytes]:
        return request.namespace, request.token_ids.view(0, self._min_tokens).tobytes()

    def _key(self, request: Request, position: int) -> tuple[str, bytes]:
        return request.namespace, request.token_ids.view(position, position + self._window).tobytes()

    def _at(self, position: int) -> dict[tuple[str, bytes], list[Request]]:
        """The added requests by their window at ``position``; the window of a shorter one is too short to match."""
        found = self._by_window.setdefault(position, {})
        for other in self._all[self._sorted.get(position, 0) :]:
            found.setdefault(self._key(other, position), []).append(other)
        self._sorted[position] = len(self._all)
        return found

    def _shares(self, request: Request, end: TreeNode, cached: int, other: Request) -> bool:
        """True if both begin with the same ``cached`` tokens. end: the node in which those of ``request`` end."""
        kv = other.kv
        if kv is None or kv.node is None:
            return False
        depth = min(cached, kv.tree_len)
        if depth and self._cache.tree.node_at(end, depth) is not self._cache.tree.node_at(kv.node, depth):
            return False
        mine, theirs = request.token_ids.view(depth, cached), other.token_ids.view(depth, cached)
        return np.array_equal(mine, theirs)
