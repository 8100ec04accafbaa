"""Copies between card and host by the clock of a simulation: one lane each way, one copy after the other in each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from ...radix.tiers.block_orders import BlockOrder
from ...radix.tiers.host_tier import TierCopy
from .cost_model import StepCost


class EndedCopy(NamedTuple):
    end: float
    fence: int
    seconds: float
    """How long it took itself."""


class CopyLanes:
    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._free = {True: 0.0, False: 0.0}
        """When the lane to the host, and the one from there, has done all that was ordered."""
        self._under_way: list[EndedCopy] = []
        """A heap."""
        self.loads_end = 0.0
        """When the last load has come: a step that is launched now waits for that, layer by layer."""

    def order(self, orders: Sequence[TierCopy | BlockOrder], now: float) -> None:
        for order in orders:
            assert isinstance(order, TierCopy), "nothing behind the host is simulated"
            tokens = len(order.host_slots)
            seconds = self._cost.store_s(tokens) if order.to_host else self._cost.load_s(tokens)
            end = max(now, self._free[order.to_host]) + seconds
            self._free[order.to_host] = end
            heapq.heappush(self._under_way, EndedCopy(end, order.fence, seconds))
            if not order.to_host:
                self.loads_end = end

    def take_ended(self, now: float) -> list[EndedCopy]:
        ended: list[EndedCopy] = []
        while self._under_way and self._under_way[0].end <= now:
            ended.append(heapq.heappop(self._under_way))
        return ended

    def next_end(self) -> float | None:
        return self._under_way[0].end if self._under_way else None
