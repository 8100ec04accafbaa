"""Copies between device and host, as the scheduler sees them: which are due, and what becomes of requests if one fails.

    next_batch ─▶ take ─▶ whoever makes copies, before the step is launched ─▶ ended

A step may read what a load brings: whoever makes the copies has it wait, layer by layer. So nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable

from ...radix.host_tier import TierCopy
from ..memory.kv_memory import KVMemory
from ..queue.live import LiveRequests
from ..request import Request, RequestEvent
from ..stats import CopyStats, TierStats
from .rates import CopyRate


class TierCopies:
    """Hands out the copies that the tiers want, and hears of their ends."""

    FAILED = "its KV could not be brought back from host memory; send it again"

    def __init__(
        self,
        memory: KVMemory,
        live: LiveRequests,
        abort: Callable[[list[Request], float, str], list[RequestEvent]],
    ) -> None:
        """abort: ends requests at a time, with a message."""
        self._memory = memory
        self._live = live
        self._abort = abort
        self.store_rate = CopyRate()
        """Of copies from the device to the host."""
        self.load_rate = CopyRate()
        """Of copies from the host to the device."""

    def take(self) -> list[TierCopy]:
        """The copies that are due, loads first; to be ordered before the step that was formed just now is launched."""
        return self._memory.take_tier_copies()

    @property
    def under_way(self) -> int:
        """Copies that have not ended."""
        return self._memory.copies_under_way

    def ended(self, fence: int, ok: bool, now: float, seconds: float = 0.0) -> list[RequestEvent]:
        """A copy has been made, or has failed; once for each. Steps that wait for a failed load fail; the requests that
        would go on with what it did not bring end here. seconds: how long it took itself."""
        assert self._memory.tier is not None, "only a tier orders copies"
        copy = self._memory.tier.under_way[fence].copy
        if ok:
            (self.store_rate if copy.to_host else self.load_rate).note(len(copy.host_slots), seconds)
        spoilt = self._memory.tier.ended(fence, ok)
        if spoilt is None:
            return []
        return self._abort(self._memory.users_of(spoilt, self._live), now, self.FAILED)

    def stats(self) -> tuple[TierStats, ...]:
        """Of each tier below the device."""
        tier = self._memory.tier
        if tier is None:
            return ()
        allocator, counts, stores, loads = tier.allocator, tier.counts, self.store_rate, self.load_rate
        return (
            TierStats(
                tier="host",
                total_tokens=allocator.total_tokens,
                used_tokens=tier.tokens,
                free_tokens=allocator.free_tokens,
                quarantined_tokens=allocator.quarantined_tokens,
                copies_under_way=len(tier.under_way),
                evicted_tokens=counts.evicted,
                no_room_tokens=counts.no_room,
                stores=CopyStats(counts.stored, stores.seconds, counts.failed_stores, stores.tokens_per_s),
                loads=CopyStats(counts.loaded, loads.seconds, counts.failed_loads, loads.tokens_per_s),
            ),
        )
