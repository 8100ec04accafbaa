"""The tiers below the device, as the scheduler sees them: what is copied when, and who waits for it.

    add ──▶ queue ──▶ waiting ─────────────────────────────▶ admitted; what is on the host is loaded with its first step
              │          ▲
              └▶ loading ┘   its prefix is being read to the host, from disk or a remote store; it holds nobody up

    next_batch ─▶ take ─▶ whoever does it, before the step is launched ─▶ copy_ended, blocks_ended

A step may read what a load brings: whoever makes the copies has it wait, layer by layer. So nothing here waits.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from ...radix.tiers.block_orders import BlockOrder
from ...radix.tiers.block_tier import BlockTier, Found
from ...radix.tiers.host_tier import TierCopy
from ..memory.kv_memory import KVMemory
from ..memory.transfer_rates import TransferRates
from ..policies.fill_time import FillTime
from ..queue.live import LiveRequests
from ..queue.waiting import WaitingQueue
from ..request import Request, RequestStatus
from ..stats import CopyStats, TierStats

LOADING_S = 5.0
"""The longest that a request waits for its prefix, its turn included; then what has not come is computed."""

ASKING_S = 0.25
"""The longest that it waits for a remote store to say what it has."""

MAX_READS = 3
"""Reads that one request waits for: the second brings what the first did not, if it is still there."""


class Tiers:
    """Hands out the orders that the tiers want done, hears of their ends, and lets requests wait for them."""

    def __init__(
        self,
        memory: KVMemory,
        live: LiveRequests,
        waiting: WaitingQueue,
        fill_time: FillTime,
        host_rates: TransferRates,
        stores: Sequence[BlockTier] = (),
    ) -> None:
        """fill_time: the cost of computing KV again. host_rates: how fast copies between device and host are; measured
        here. stores: those behind the host, the fastest first."""
        self._memory = memory
        self._live = live
        self._waiting = waiting
        self._stores = stores
        self._rates = {"host": host_rates} | {store.name: TransferRates(fill_time) for store in stores}
        self._readers: dict[int, list[Request]] = {}
        """Who waits for which read, or for which answer."""
        self._in_turn: deque[Request] = deque()
        """Those whose read has not begun, because others fill the host."""
        self._late: set[int] = set()
        """Reads and questions that somebody has waited for in vain, and that are not over."""

    @property
    def num_queued(self) -> int:
        """Requests that wait for admission, or for their prefix."""
        return len(self._waiting) + len(self._in_turn) + sum(map(len, self._readers.values()))

    @property
    def under_way(self) -> int:
        """Copies between device and host that have not ended."""
        return self._memory.copies_under_way

    # -- orders -------------------------------------------------------------------------------------------------------

    def take(self, now: float) -> list[TierCopy | BlockOrder]:
        """What is due; to be ordered before the step that was formed just now is launched."""
        orders: list[TierCopy | BlockOrder] = list(self._memory.take_tier_copies())
        for store in self._stores:
            orders += store.take_orders(now)
        return orders

    def copy_ended(self, fence: int, ok: bool, seconds: float = 0.0) -> list[Request]:
        """A copy has been made, or has failed; once for each. Steps that wait for a failed load fail. Returns the
        requests that must end, because they hold what it did not bring. seconds: how long it took itself."""
        assert self._memory.tier is not None, "only a tier orders copies"
        copy, rates = self._memory.tier.under_way[fence].copy, self._rates["host"]
        if ok:
            (rates.stores if copy.to_host else rates.loads).note(len(copy.host_slots), seconds)
        spoilt = self._memory.tier.ended(fence, ok)
        return [] if spoilt is None else self._memory.users_of(spoilt, self._live)

    def blocks_ended(self, fence: int, blocks: int, now: float, seconds: float = 0.0) -> None:
        """An order of a store is over; see `BlockTier.ended`. Those who waited for it go on. seconds: how long it took
        itself."""
        store = next(store for store in self._stores if store.owns(fence))
        if fence in store.writing or fence in store.readings:
            rates = self._rates[store.name]
            (rates.stores if fence in store.writing else rates.loads).note(blocks * store.block_tokens, seconds)
        adopted = store.ended(fence, blocks)
        self._late.discard(fence)
        readers = self._readers.pop(fence, [])
        for request in readers:
            brought = request.loading.brought
            brought[store.name] = brought.get(store.name, 0) + adopted
        self.queue(readers, now)
        self._begin_in_turn(now)

    def stats(self) -> tuple[TierStats, ...]:
        """Of each tier below the device."""
        host = self._memory.tier
        if host is None:
            return ()
        counts, rates = host.counts, self._rates["host"]
        tiers = [
            TierStats(
                tier="host",
                total_tokens=host.allocator.total_tokens,
                used_tokens=host.tokens,
                free_tokens=host.allocator.free_tokens,
                quarantined_tokens=host.allocator.quarantined_tokens,
                copies_under_way=len(host.under_way),
                evicted_tokens=counts.evicted,
                no_room_tokens=counts.no_room,
                stores=CopyStats(counts.stored, *rates.stores.seen, counts.failed_stores),
                loads=CopyStats(counts.loaded, *rates.loads.seen, counts.failed_loads),
            )
        ]
        for store in self._stores:
            seen, rates = store.counts, self._rates[store.name]
            tiers.append(
                replace(
                    _sized(store),
                    copies_under_way=len(store.writing) + len(store.readings),
                    stores=CopyStats(seen.written, *rates.stores.seen, seen.failed_writes),
                    loads=CopyStats(seen.read, *rates.loads.seen, seen.missed),
                )
            )
        return tuple(tiers)

    # -- requests -----------------------------------------------------------------------------------------------------

    def queue(self, requests: list[Request], now: float) -> None:
        """Let requests wait for admission; first for their prefix, where a store has more of it than there is here."""
        self._waiting.add([request for request in requests if not self._loads(request, now)])

    def remove(self, request: Request) -> None:
        """Remove one that waits. What is being read for it comes all the same."""
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        elif request in self._in_turn:
            self._in_turn.remove(request)
        else:
            next(readers for readers in self._readers.values() if request in readers).remove(request)

    def discard(self, request: Request) -> None:
        """Remove one that waits for its prefix, if it is there."""
        self._in_turn = deque(other for other in self._in_turn if other is not request)
        for fence, readers in self._readers.items():
            self._readers[fence] = [other for other in readers if other is not request]

    def keep_only(self, live: Collection[Request]) -> set[Request]:
        """Remove all that are not among these, or do not wait for their prefix. Returns those that do."""
        for request in (*self._in_turn, *itertools.chain(*self._readers.values())):
            if request not in live or request.status is not RequestStatus.LOADING:
                self.discard(request)
        return {*self._in_turn, *itertools.chain(*self._readers.values())}

    @property
    def fences(self) -> set[int]:
        """Of every copy, read, write and question that is under way."""
        tier = self._memory.tier
        fences = set(tier.under_way) if tier is not None else set()
        return fences.union(*(store.fences for store in self._stores))

    def end_overdue(self, now: float) -> None:
        """Let those go on who have waited for their prefix for too long."""
        if not (self._readers or self._in_turn):
            return
        loading = itertools.chain(self._in_turn, *self._readers.values())
        overdue = [request for request in loading if now >= request.loading.deadline]
        self._late |= {fence for fence, readers in self._readers.items() if any(r in overdue for r in readers)}
        for request in overdue:
            self.remove(request)
            request.status = RequestStatus.WAITING
        self._waiting.add(overdue)

    def _loads(self, request: Request, now: float) -> bool:
        """Does the request wait for its prefix from now on?"""
        request.status = RequestStatus.WAITING
        if not self._stores or request.has_claim:
            return False
        if request.loading.reads == 0:
            request.loading.deadline = now + LOADING_S
        if request.loading.reads >= MAX_READS or now >= request.loading.deadline:
            return False
        if (best := self._find(request)) is not None:
            if not self._begin(request, *best, now):
                if not self._readers:
                    return False  # nobody makes room
                self._in_turn.append(request)
        elif request.loading.asked or not self._ask(request, now):
            return False
        request.status = RequestStatus.LOADING
        return True

    def _find(self, request: Request) -> tuple[BlockTier, Found] | None:
        """The store that brings most, the fastest of equals."""
        ids = request.token_ids.view(0, request.prefix_limit)
        found = [
            (store, there) for store in self._answering() if (there := store.find(request.namespace, ids)) is not None
        ]
        found = [each for each in found if self._rates[each[0].name].loading_pays()]
        return max(found, key=lambda each: each[1].gain) if found else None

    def _answering(self) -> list[BlockTier]:
        """The stores that let nobody wait in vain just now: a disk may hang for good."""
        return [store for store in self._stores if not any(map(store.owns, self._late))]

    def _ask(self, request: Request, now: float) -> bool:
        """Have the stores asked that do not know what they have; False if there is none."""
        ids = request.token_ids.view(0, request.prefix_limit)
        for store in self._answering():
            fence = store.begin_find(request.namespace, ids, ASKING_S)
            if fence is not None:
                request.loading.asked, request.loading.deadline = True, now + ASKING_S
                self._readers[fence] = [request]
                return True
        return False

    def _begin(self, request: Request, store: BlockTier, found: Found, now: float) -> bool:
        """Begin to read for a request, or join whoever reads it. False if it must wait for its turn."""
        fence = found.under_way or store.begin_read(found, request.loading.deadline - now)
        if fence is None:
            return False
        in_part = not found.under_way and len(store.readings[fence].order.keys) < len(found.keys)
        request.loading.reads = MAX_READS if in_part else request.loading.reads + 1  # there is room for no more
        self._readers.setdefault(fence, []).append(request)
        return True

    def _begin_in_turn(self, now: float) -> None:
        """Let those begin whose turn it is, as far as there is room."""
        while self._in_turn:
            request = self._in_turn[0]
            best = self._find(request)
            begun = best is not None and self._begin(request, *best, now)
            if not begun and best is not None and self._readers:
                return
            self._in_turn.popleft()
            if not begun:
                request.status = RequestStatus.WAITING
                self._waiting.add([request])


def _sized(store: BlockTier) -> TierStats:
    """With how full the store is."""
    size, tokens = store.size(), store.block_tokens
    if size is None:
        return TierStats(store.name, total_tokens=None, used_tokens=None, free_tokens=None)
    return TierStats(
        store.name,
        total_tokens=size.total_blocks * tokens,
        used_tokens=size.used_blocks * tokens,
        free_tokens=max(0, size.total_blocks - size.used_blocks) * tokens,
        total_bytes=size.total_bytes,
        used_bytes=size.used_bytes,
        evicted_tokens=size.evicted_blocks * tokens,
    )
