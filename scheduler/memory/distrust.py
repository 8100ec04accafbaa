"""What happens to KV that gave logits which are not finite: none of it is shared, and nobody finds it again.

A NaN or an infinity in the K or V of one token spoils every token that attends to it. So requests that share a spoiled
prefix all fail, and would fail for ever while it is cached. The step says which token it was: what comes before it is
as good as ever. Where no K or V shows it, all of the request goes: large numbers may overflow later only.

    before the requests end   what they hold behind the tree counts as never committed, so that closing them publishes
                              nothing
    after it                  the prefixes that they used leave the tree from that token on, with all that hangs on them
                              (`drop_path`); leases on those break. Running requests that share them go on,
                              and fail by themselves if they must.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...radix.dropping import drop_path
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
    paths: list[tuple[TreeNode, int]]
    """The last nodes of their cached prefixes, and how many first tokens of these are sound, in whole pages."""
    copied: list[Lease]
    """Leases that they copied their first tokens from."""


class Distrust:
    """Ends the trust in what some requests computed or shared."""

    MESSAGE = (
        "the model's logits for this request are not finite (NaN or infinity), so no token can be chosen; what may be "
        "spoiled in the cache is dropped. Send it again; if it fails again, the weights or the dtype do not suit it"
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

    def end(self, requests: Sequence[Request], failed_rows: Mapping[int, int], now: float) -> list[RequestEvent]:
        """End the requests in these rows of a step, and their siblings; their clients get a 500. Those that have ended
        already are passed over.

        requests: one for each row. failed_rows: as `StepResult` has them.
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

    def _take(self, requests: Sequence[Request], failed_rows: Mapping[int, int]) -> _Distrusted:
        """Note what the requests use, and have none of it published when they end."""
        sound: dict[str, int] = {}
        for row, tokens in failed_rows.items():
            request = requests[row]
            if request.finish is None:
                sound[request.rid] = min(tokens, sound.get(request.rid, tokens))
        found = _Distrusted([request for rid in sound for request in self._live.of(rid)], [], [])
        page = self._memory.page_size
        for request in found.requests:
            tokens = sound[request.rid]
            if request.kv is not None and request.kv.node is not None:
                found.paths.append((request.kv.node, tokens - tokens % page))
                request.committed_len = min(request.committed_len, request.kv.tree_len)
            inheritance = request.inheritance
            if inheritance is not None and inheritance.copied is not None and tokens < inheritance.inherited_tokens:
                found.copied.append(inheritance.copied)
        self._counters.nonfinite_requests += len(sound)
        return found

    def _drop(self, distrusted: _Distrusted) -> None:
        """Drop what the requests used, now that they have ended."""
        leases, cache = self._memory.leases, self._memory.cache
        for lease in leases.live():
            if lease in distrusted.copied or any(self._shares(lease, node, kept) for node, kept in distrusted.paths):
                leases.break_lease(lease)
        for node, kept in distrusted.paths:
            drop_path(cache, node, kept)

    def _shares(self, lease: Lease, node: TreeNode, kept: int) -> bool:
        """Does the lease hold what comes after the first ``kept`` tokens of the path down to ``node``?"""
        own, tree = lease.kv.node if lease.kv is not None else None, self._memory.cache.tree
        if own is None or own.prefix_len <= kept or node.prefix_len <= kept:
            return False
        return tree.node_at(own, kept + 1) is tree.node_at(node, kept + 1)
