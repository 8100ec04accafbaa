"""Copies between device and host by the clock of a simulation: one lane each way, one copy at a time in each."""

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
    """Duration of the copy, without its wait for the lane."""


class CopyLanes:
    """One lane to the host and one from there. Times are seconds of the simulation's clock."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._free = {True: 0.0, False: 0.0}
        """Time at which each lane is free: key True for the one to the host, False for the one from there."""
        self._under_way: list[EndedCopy] = []
        """A heap."""
        self.loads_end = 0.0
        """End of the last load ordered; a step that is launched before then waits for it, layer by layer."""
        self.states_end = 0.0
        """Time at which the states of all loads ordered are there; no step begins before."""

    def order_copies(self, orders: Sequence[TierCopy | BlockOrder], now: float) -> None:
        """The states of all loads of a call come first, then their KV, one load after the other."""
        copies = [order for order in orders if isinstance(order, TierCopy)]
        assert len(copies) == len(orders), "nothing behind the host is simulated"
        loads = [copy for copy in copies if not copy.to_host]
        if states := sum(copy.device_state > 0 for copy in loads):
            self._free[False] = self.states_end = max(now, self._free[False]) + self._cost.load_s(0, states)
        for copy in copies:
            tokens, states = len(copy.host_slots), int(copy.host_state > 0)
            seconds = self._cost.store_s(tokens, states) if copy.to_host else self._cost.load_s(tokens, states)
            own = seconds if copy.to_host else self._cost.load_s(tokens, 0)
            end = max(now, self._free[copy.to_host]) + own
            self._free[copy.to_host] = end
            heapq.heappush(self._under_way, EndedCopy(end, copy.fence, seconds))
            if not copy.to_host:
                self.loads_end = end

    def take_ended_copies(self, now: float) -> list[EndedCopy]:
        ended: list[EndedCopy] = []
        while self._under_way and self._under_way[0].end <= now:
            ended.append(heapq.heappop(self._under_way))
        return ended

    def next_end(self) -> float | None:
        return self._under_way[0].end if self._under_way else None
