"""Quarantines the KV of requests with non-finite logits, so that no other request computes with it.

A NaN or an infinity in the K or V of one token spoils every token that attends to it. Requests that share a spoiled
prefix therefore all fail, and would fail for as long as it is cached. The step reports the first spoiled token: the
tokens before it are sound. Where neither K nor V shows a fault, all of the request's KV goes: large numbers may
overflow only in a later layer.

    withhold_kv   before the requests end: what they hold behind the tree counts as never committed, so that closing
                  them publishes nothing, and they give up their recurrent states
    drop_kv       afterwards: the prefixes that they used leave the tree from the spoiled token on, with everything
                  below (`drop_path`), and leases on those break. Running requests that share them keep running, and
                  fail in their own step if their logits are spoiled too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...radix.discarding import drop_path
from ...radix.lease import Lease
from ...radix.node import TreeNode
from ..queues import LiveRequests
from ..request import Request
from .kv_memory import KVMemory

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class SpoiledKV:
    """Requests that must end together, and the KV that they used."""

    requests: list[Request]
    """Every live sequence of the failed rids."""
    num_rids: int
    paths: list[tuple[TreeNode, int]]
    """The last nodes of their cached prefixes, each with the number of sound tokens before the fault, in whole
    pages."""
    copied_leases: list[Lease]
    """Leases that they copied their first tokens from."""


class NonFiniteGuard:
    """Keeps spoiled KV from being shared. The scheduler ends the requests between the two calls."""

    def __init__(self, memory: KVMemory, live: LiveRequests) -> None:
        self._memory = memory
        self._live = live

    def withhold_kv(self, requests: Sequence[Request], failed_rows: Mapping[int, int]) -> SpoiledKV:
        """Return the requests that must end, and keep what they computed from being published when they do. Requests
        that have ended already are skipped.

        requests: one for each row of a step. failed_rows: see `StepResult`.
        """
        sound: dict[str, int] = {}
        for row, tokens in failed_rows.items():
            request = requests[row]
            if request.finish is None:
                sound[request.rid] = min(tokens, sound.get(request.rid, tokens))
        spoiled = SpoiledKV([request for rid in sound for request in self._live.siblings_of(rid)], len(sound), [], [])
        page = self._memory.page_size
        for request in spoiled.requests:
            tokens = sound[request.rid]
            if request.kv is not None and request.kv.node is not None:
                spoiled.paths.append((request.kv.node, tokens - tokens % page))
                self._memory.drop_states(request)
                request.committed_len = min(request.committed_len, request.kv.tree_len)
            inheritance = request.inheritance
            if inheritance is not None and inheritance.copied is not None and tokens < inheritance.inherited_tokens:
                spoiled.copied_leases.append(inheritance.copied)
        if sound:
            logger.warning("the logits of %d requests are not finite: %s", len(sound), ", ".join(sorted(sound))[:200])
        return spoiled

    def drop_kv(self, spoiled: SpoiledKV) -> None:
        """Drop what the requests used from the tree, now that they have ended."""
        leases, cache = self._memory.leases, self._memory.cache
        for lease in leases.live():
            if lease in spoiled.copied_leases or any(self._shares(lease, *path) for path in spoiled.paths):
                leases.break_lease(lease)
        for node, kept in spoiled.paths:
            drop_path(cache, node, kept)

    def _shares(self, lease: Lease, node: TreeNode, kept: int) -> bool:
        """True if the lease holds KV that comes after the first ``kept`` tokens of the path down to ``node``."""
        own, tree = lease.kv.node if lease.kv is not None else None, self._memory.cache.tree
        if own is None or own.prefix_len <= kept or node.prefix_len <= kept:
            return False
        return tree.node_at(own, kept + 1) is tree.node_at(node, kept + 1)
