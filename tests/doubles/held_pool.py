"""A host pool whose copies wait for permits, so that a test says how far a thread gets."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from baton.memory_pool.kv_pool import KVPool
from baton.memory_pool.stores.host_pool import HostPool
from baton.radix.tiers.host_tier import TierCopy


class Call(NamedTuple):
    """One call of the pool."""

    kind: str
    """load or store."""
    first: int
    """The first host slot."""
    size: int
    """Tokens."""
    layer: int


class HeldPool(HostPool):
    """``calls`` has what was begun; ``errors`` what calls raise, by kind, first host slot and layer."""

    def __init__(self, device_pool: KVPool, num_tokens: int, **options: Any) -> None:
        super().__init__(device_pool, num_tokens, **options)
        self.calls: list[Call] = []
        self.errors: dict[tuple[str, int, int], BaseException] = {}
        self._held = False
        self._begun, self._permits = threading.Semaphore(0), threading.Semaphore(0)

    def hold(self) -> None:
        """From now on each call waits for a permit."""
        self._held = True

    def permit(self, count: int = 1) -> None:
        self._permits.release(count)

    def let_go(self) -> None:
        self._held = False
        self._permits.release(10_000)

    def wait_begun(self, count: int = 1) -> None:
        """Until as many calls more have begun."""
        for _ in range(count):
            assert self._begun.acquire(timeout=60)

    def store(self, device_slots: np.ndarray, host_slots: np.ndarray) -> None:
        self._pass(Call("store", int(host_slots[0]), len(host_slots), 0))
        super().store(device_slots, host_slots)

    def load(self, host_slots: np.ndarray, device_slots: np.ndarray, layers: slice | None = None) -> None:
        assert layers is not None
        self._pass(Call("load", int(host_slots[0]), len(host_slots), layers.start))
        super().load(host_slots, device_slots, layers)

    def _pass(self, call: Call) -> None:
        self.calls.append(call)
        self._begun.release()
        if self._held:
            assert self._permits.acquire(timeout=60)
        if (error := self.errors.get((call.kind, call.first, call.layer))) is not None:
            raise error


def tier_copy(fence: int, *, to_host: bool, device: int, host: int, tokens: int) -> TierCopy:
    """A copy of neighbouring slots, beginning with these."""
    slots = np.arange(tokens, dtype=np.int32)
    return TierCopy(fence, to_host, slots + np.int32(device), slots + np.int32(host))
