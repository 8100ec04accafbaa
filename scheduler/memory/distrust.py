"""What happens to KV that gave logits which are not finite: none of it is shared, and nobody finds it again.

A NaN or an infinity in the K or V of one token spoils every token that attends to it. So requests that share a spoiled
prefix all fail, and would fail for ever while it is cached. Nobody can tell which of a request's tokens it was: all go.

    before the requests end   what they hold behind the tree counts as never committed, so that closing them publishes
                              nothing
    after it                  the prefixes that they used leave the tree with all that hangs on them
                              (`RadixCache.drop_path`); leases on those break. Running requests that share them go on,
                              and fail by themselves if they must.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...radix.lease import Lease
from ...radix.node import TreeNode
from ..outcome import RequestRefused
from ..queue.live import LiveRequests
from ..request import Request, RequestEvent
from ..stats import SchedulerCounters
from .kv_memory import KVMemory

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _Distrusted:
    """Requests that end together, and what they used."""

    requests: list[Request]
    paths: list[TreeNode]
    """The last nodes of their cached prefixes."""
    copied: list[Lease]
    """Leases that they copied their first tokens from."""


class Distrust:
    """Ends the trust in what some requests computed or shared."""

    MESSAGE = (
        "the model's logits for this request are not finite (NaN or infinity), so no token can be chosen; what was "
        "cached of it is dropped. Send it again; if it fails again, the weights or the dtype do not suit it"
    )

    def __init__(
        self,
        memory: KVMemory,
        counters: SchedulerCounters,
        live: LiveRequests,
        abort: Callable[[list[Request], float, str], list[RequestEvent]],
    ) -> None:
        """abort: ends requests at a time, with a message."""
        self._memory = memory
        self._counters = counters
        self._live = live
        self._abort = abort

    def end(self, requests: Sequence[Request], failed_rows: Sequence[int], now: float) -> list[RequestEvent]:
        """End the requests in these rows of a step, and their siblings; their clients get a 500. Those that have ended
        already are passed over.

        requests: one for each row.
        """
        distrusted = self._take(requests, failed_rows)
        if not distrusted.requests:
            return []
        events = self._abort(distrusted.requests, now, self.MESSAGE)
        self._drop(distrusted)
        rids = {request.rid for request in distrusted.requests}
        for event in events:
            if event.request.rid in rids:
                event.refusal = RequestRefused(self.MESSAGE, status=500, code="logits_not_finite")
        logger.warning("the logits of %d requests are not finite: %s", len(rids), ", ".join(sorted(rids))[:200])
        return events

    def _take(self, requests: Sequence[Request], failed_rows: Sequence[int]) -> _Distrusted:
        """Note what the requests use, and have none of it published when they end."""
        rids = dict.fromkeys(requests[row].rid for row in failed_rows if requests[row].finish is None)
        found = _Distrusted([request for rid in rids for request in self._live.of(rid)], [], [])
        for request in found.requests:
            if request.kv is not None and request.kv.node is not None:
                found.paths.append(request.kv.node)
                request.committed_len = min(request.committed_len, request.kv.tree_len)
            if request.inheritance is not None and request.inheritance.copied is not None:
                found.copied.append(request.inheritance.copied)
        self._counters.nonfinite_requests += len(rids)
        return found

    def _drop(self, distrusted: _Distrusted) -> None:
        """Drop what the requests used, now that they have ended."""
        leases, cache = self._memory.leases, self._memory.cache
        branches = {cache.tree.branch(node) for node in distrusted.paths} - {cache.tree.root}
        for lease in leases.live():
            node = lease.kv.node if lease.kv is not None else None
            if lease in distrusted.copied or (node is not None and cache.tree.branch(node) in branches):
                leases.break_lease(lease)
        for node in distrusted.paths:
            cache.drop_path(node)
