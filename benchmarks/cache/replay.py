"""Replays a trace on the real radix cache, one request at a time, with or without clients' hints about the future."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from baton.radix.discarding import retire
from baton.radix.node import TreeNode
from benchmarks.cache.traces import Request, Trace
from benchmarks.core.cache_server import CacheServer


class Replayed(NamedTuple):
    hits: list[int]
    """Cached prompt tokens of each request."""
    evict_us: float
    """Microseconds of processor time for each node that was evicted: to choose it, free its slots, forget it."""


class _TimedServer(CacheServer):
    """Counts the nodes that are evicted, and the time that takes."""

    def __init__(self, pool: int, max_context: int, order: str) -> None:
        super().__init__(pool, num_rows=2, max_context=max_context, eviction=order)
        self.cache.watchers.add_watcher(self)
        self.nodes, self.seconds = 0, 0.0

    def make_room(self, tokens: int) -> None:
        begin = time.thread_time()
        super().make_room(tokens)
        self.seconds += time.thread_time() - begin

    def node_stored(self, node: TreeNode) -> None:
        pass

    def path_used(self, node: TreeNode, tick: int) -> None:
        pass

    def nodes_removed(self, nodes: Sequence[TreeNode]) -> None:
        self.nodes += len(nodes)

    def cache_cleared(self) -> None:
        pass


def replay(trace: Trace, pool: int, order: str, *, hints: bool) -> Replayed:
    """pool: tokens, more than the longest request has. order: of eviction, by name. hints: requests mark tokens that
    will not be requested again."""
    server, hits = _TimedServer(pool, max(trace.content.lengths) + 1, order), []
    for request in trace.requests:
        ids, prompt = trace.content.token_ids(request.end), trace.content.lengths[request.prompt]
        seq = server.start(ids[:prompt], prompt)
        hits.append(seq.tree_len)
        server.cache.cache_unfinished_req(seq, ids[:prompt])
        server.extend(seq, len(ids))
        server.cache.cache_finished_req(seq, ids)
        server.rows.take_updates()
        if hints:
            _retire(server, request, ids)
    return Replayed(hits, server.seconds / max(server.nodes, 1) * 1e6)


def _retire(server: CacheServer, request: Request, ids: np.ndarray) -> None:
    """As the scheduler does when a request ends."""
    if request.is_last or request.no_reuse_from is not None:
        node, _, _ = server.cache.find_prefix("", ids)
        retire(server.cache, node, request.no_reuse_from or 0, leased=True)
