"""Copies between device and host for a scheduler on the KV-echo model: made late, ended in any order, and failing."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from kv_echo import KVEchoModel

from baton.memory_pool.allocator import Allocator
from baton.radix.cache import RadixCache
from baton.radix.host_invariants import check_host
from baton.radix.host_tier import HostPolicy, HostTier, TierCopy


@dataclass
class _Ordered:
    copy: TierCopy
    ok: bool
    made: bool = False


class FakeTiers:
    """Owns the host tier and the copies that have been ordered. Without ``rng`` every copy is made, and ends, with the
    turn in which it is ordered."""

    def __init__(
        self,
        cache: RadixCache,
        model: KVEchoModel,
        *,
        host_tokens: int,
        policy: HostPolicy | None = None,
        rng: random.Random | None = None,
        failure_rate: float = 0.0,
    ) -> None:
        page = cache.page_size
        allocator = Allocator(host_tokens, page, fences=cache.allocator.fences, check=True)
        self.tier = HostTier(cache, allocator, policy)
        cache.residency = self.tier
        self.failure_rate = failure_rate
        self._cache = cache
        self._model = model
        self._rng = rng
        self._copies: list[_Ordered] = []
        model.host_kv = np.zeros(host_tokens + page, dtype=np.uint64)

    def __len__(self) -> int:
        """Copies that have not ended."""
        return len(self._copies)

    def order(self, copies: list[TierCopy]) -> None:
        rng = self._rng
        self._copies += [_Ordered(copy, rng is None or rng.random() >= self.failure_rate) for copy in copies]

    def load_all(self) -> bool:
        """A step is launched: what it may read is brought first. False if that failed: so does the step."""
        ok = True
        for ordered in self._copies:
            if not ordered.copy.to_host:
                self._make(ordered)
                ok = ok and ordered.ok
        return ok

    def take_ended(self) -> list[tuple[int, bool]]:
        """(fence, ok) of copies that end now: all, or those that chance picks, in any order."""
        rng = self._rng
        if rng is not None:
            rng.shuffle(self._copies)
        count = len(self._copies) if rng is None else rng.randrange(len(self._copies) + 1)
        ended, self._copies = self._copies[:count], self._copies[count:]
        for ordered in ended:
            self._make(ordered)
        return [(ordered.copy.fence, ordered.ok) for ordered in ended]

    def check(self) -> None:
        check_host(self.tier, self._cache.tree)

    def _make(self, ordered: _Ordered) -> None:
        if not ordered.made:
            ordered.made = True
            self._model.copy(ordered.copy, ordered.ok)
