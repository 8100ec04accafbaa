"""Moves KV between the device and the tiers below it, and holds requests while their prefix is loaded.

    add_request ──▶ queue_requests ──▶ waiting ──▶ admitted; KV on the host is loaded with the first step
                          │               ▲
                          └──▶ loading ───┘   the prefix is read to the host from disk or a remote store; meanwhile
                                              other requests are admitted

    next_batch ─▶ take_orders ─▶ the runtime, before it launches the step ─▶ finish_copy, finish_block_order

A step may read the slots that a load fills: the runtime makes it wait, layer by layer. So nothing here waits for
copies.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from ..radix.tiers.block_orders import BlockOrder
from ..radix.tiers.block_tier import BlockTier, Found
from ..radix.tiers.host_tier import HostTier, TierCopy
from .memory.kv_memory import KVMemory
from .memory.transfer_rates import TransferRates
from .policies.fill_time import FillTime
from .queues import LiveRequests, WaitingQueue
from .request import Request, RequestStatus
from .stats import CopyStats, TierStats

LOADING_S = 5.0
"""Seconds that a request waits for its prefix at most, queueing included; then the missing part is computed."""

ASKING_S = 0.25
"""Seconds that it waits at most for a remote store to report which blocks it has."""

MAX_READS = 3
"""Reads that one request waits for; a later one fetches blocks that the first did not bring, if they still exist."""


class OffloadScheduler:
    """Issues transfers between tiers, handles their completions, and owns the requests that wait for a read."""

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
        """Requests that wait for a read or a query, by its fence."""
        self._deferred: deque[Request] = deque()
        """Requests with a read that has not begun, because other reads take up the host's free pages."""
        self._late: set[int] = set()
        """Reads and queries that are still under way although their requests timed out."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission, or for their prefix to be loaded."""
        return len(self._waiting) + len(self._deferred) + sum(map(len, self._readers.values()))

    @property
    def copies_under_way(self) -> int:
        """Copies between device and host that have not ended."""
        return self._memory.copies_under_way

    # -- orders -------------------------------------------------------------------------------------------------------

    def take_orders(self, now: float) -> list[TierCopy | BlockOrder]:
        """The transfers that are due. The runtime must start them before it launches the step formed last."""
        orders: list[TierCopy | BlockOrder] = list(self._memory.take_tier_copies())
        for store in self._stores:
            orders += store.take_orders(now)
        return orders

    def finish_copy(self, fence: int, ok: bool, seconds: float = 0.0) -> list[Request]:
        """A copy has been made, or has failed; call it once for each copy. Steps that wait for a failed load fail.
        Returns the requests that must end, because they hold slots that the load did not fill. seconds: duration of
        the copy itself."""
        assert self._memory.tier is not None, "only a tier orders copies"
        copy, rates = self._memory.tier.under_way[fence].copy, self._rates["host"]
        if ok and len(copy.host_slots):  # a state alone says nothing of the rate of KV
            (rates.stores if copy.to_host else rates.loads).record_copy(len(copy.host_slots), seconds)
        failed = self._memory.tier.finish_copy(fence, ok)
        return [] if failed is None else self._memory.users_of(failed, self._live)

    def finish_block_order(self, fence: int, blocks: int, now: float, seconds: float = 0.0) -> None:
        """An order to a store has ended with ``blocks`` blocks done; see `BlockTier.finish_order`. The requests that
        wait for it queue again. seconds: duration of the order itself."""
        store = next(store for store in self._stores if store.owns(fence))
        if (tokens := store.gained_tokens(fence, blocks)) is not None:
            rates = self._rates[store.name]
            (rates.stores if fence in store.writing else rates.loads).record_copy(tokens, seconds)
        adopted = store.finish_order(fence, blocks)
        self._late.discard(fence)
        readers = self._readers.pop(fence, [])
        for request in readers:
            brought = request.loading.brought
            brought[store.name] = brought.get(store.name, 0) + adopted
        self.queue_requests(readers, now)
        self._begin_deferred_reads(now)

    def stats(self) -> tuple[TierStats, ...]:
        """The figures of each tier below the device, the host first."""
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
                **_host_states(host),
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
                    stored_states=seen.stored_states,
                    loaded_states=seen.loaded_states,
                )
            )
        return tuple(tiers)

    # -- requests -----------------------------------------------------------------------------------------------------

    def queue_requests(self, requests: list[Request], now: float) -> None:
        """Queue requests for admission. Where a store has more of a prefix than device and host, load that first."""
        self._waiting.add_requests([request for request in requests if not self._starts_loading(request, now)])

    def remove_request(self, request: Request) -> None:
        """Remove a request that waits for admission or for a read. The read itself continues."""
        if request.status is RequestStatus.WAITING:
            self._waiting.remove_request(request)
        elif request in self._deferred:
            self._deferred.remove(request)
        else:
            next(readers for readers in self._readers.values() if request in readers).remove(request)

    def discard_loading(self, request: Request) -> None:
        """Remove a request from those that wait for a read, if it is one of them."""
        self._deferred = deque(other for other in self._deferred if other is not request)
        for fence, readers in self._readers.items():
            self._readers[fence] = [other for other in readers if other is not request]

    def keep_loading(self, live: Collection[Request]) -> set[Request]:
        """Remove the requests that are not ``live`` or not loading. Returns those that still wait for a read."""
        for request in (*self._deferred, *itertools.chain(*self._readers.values())):
            if request not in live or request.status is not RequestStatus.LOADING:
                self.discard_loading(request)
        return {*self._deferred, *itertools.chain(*self._readers.values())}

    @property
    def open_fences(self) -> set[int]:
        """The fences of all copies, reads, writes and queries under way."""
        tier = self._memory.tier
        fences = set(tier.under_way) if tier is not None else set()
        return fences.union(*(store.fences for store in self._stores))

    def release_overdue(self, now: float) -> None:
        """Queue requests for admission without their prefix once its loading has timed out."""
        if not (self._readers or self._deferred):
            return
        loading = itertools.chain(self._deferred, *self._readers.values())
        overdue = [request for request in loading if now >= request.loading.deadline]
        self._late |= {fence for fence, readers in self._readers.items() if any(r in overdue for r in readers)}
        for request in overdue:
            self.remove_request(request)
            request.status = RequestStatus.WAITING
        self._waiting.add_requests(overdue)

    def _starts_loading(self, request: Request, now: float) -> bool:
        """Begin to load the request's prefix, if that pays. True if it now waits for a read or a query."""
        request.status = RequestStatus.WAITING
        if not self._stores or request.has_claim:
            return False
        if request.loading.reads == 0:
            request.loading.deadline = now + LOADING_S
        if request.loading.reads >= MAX_READS or now >= request.loading.deadline:
            return False
        if (best := self._find_stored_prefix(request)) is not None:
            if not self._begin_read(request, *best, now):
                if not self._readers:
                    return False  # no read will end and free pages
                self._deferred.append(request)
        elif request.loading.asked or not self._query_stores(request, now):
            return False
        request.status = RequestStatus.LOADING
        return True

    def _find_stored_prefix(self, request: Request) -> tuple[BlockTier, Found] | None:
        """The store that has most of the prefix beyond device and host; of equals, the fastest."""
        ids = request.token_ids.view(0, request.prefix_limit)
        found = [
            (store, there)
            for store in self._responsive_stores()
            if (there := store.find_blocks(request.namespace, ids)) is not None
        ]
        found = [each for each in found if self._rates[each[0].name].loading_pays()]
        return max(found, key=lambda each: each[1].gain) if found else None

    def _responsive_stores(self) -> list[BlockTier]:
        """The stores without a read or query that has timed out: a disk may hang for good."""
        return [store for store in self._stores if not any(map(store.owns, self._late))]

    def _query_stores(self, request: Request, now: float) -> bool:
        """Send a query to a store that must look up remotely which blocks it has. False if there is none to ask."""
        ids = request.token_ids.view(0, request.prefix_limit)
        for store in self._responsive_stores():
            fence = store.begin_find(request.namespace, ids, ASKING_S)
            if fence is not None:
                request.loading.asked, request.loading.deadline = True, now + ASKING_S
                self._readers[fence] = [request]
                return True
        return False

    def _begin_read(self, request: Request, store: BlockTier, found: Found, now: float) -> bool:
        """Begin a read for a request, or join one under way. False if the host has no free pages for it now."""
        fence = found.under_way or store.begin_read(found, request.loading.deadline - now)
        if fence is None:
            return False
        in_part = not found.under_way and len(store.readings[fence].order.keys) < len(found.keys)
        request.loading.reads = MAX_READS if in_part else request.loading.reads + 1  # the host is full
        self._readers.setdefault(fence, []).append(request)
        return True

    def _begin_deferred_reads(self, now: float) -> None:
        """Begin the reads that wait for free pages, in order, as far as there is room."""
        while self._deferred:
            request = self._deferred[0]
            best = self._find_stored_prefix(request)
            begun = best is not None and self._begin_read(request, *best, now)
            if not begun and best is not None and self._readers:
                return
            self._deferred.popleft()
            if not begun:
                request.status = RequestStatus.WAITING
                self._waiting.add_requests([request])


def _sized(store: BlockTier) -> TierStats:
    """The sizes of a store; its transfers are filled in by the caller."""
    size, tokens, states = store.size(), store.block_tokens, store.states_size()
    if size is None:
        return TierStats(
            store.name, total_tokens=None, used_tokens=None, free_tokens=None, total_states=None, used_states=None
        )
    return TierStats(
        store.name,
        total_tokens=size.total_blocks * tokens,
        used_tokens=size.used_blocks * tokens,
        free_tokens=max(0, size.total_blocks - size.used_blocks) * tokens,
        total_bytes=size.total_bytes + (states.total_bytes if states is not None else 0),
        used_bytes=size.used_bytes + (states.used_bytes if states is not None else 0),
        evicted_tokens=size.evicted_blocks * tokens,
        total_states=states.total_blocks if states is not None else 0,
        used_states=states.used_blocks if states is not None else 0,
        evicted_states=states.evicted_blocks if states is not None else 0,
    )


def _host_states(host: HostTier) -> dict[str, int]:
    """The fields of TierStats for recurrent states."""
    states, counts = host.states_on_host, host.counts
    if states is None:
        return {}
    return {
        "total_states": states.slots.total,
        "used_states": states.slots.held,
        "stored_states": counts.stored_states,
        "loaded_states": counts.loaded_states,
        "evicted_states": counts.evicted_states,
        "no_room_states": counts.no_room_states,
    }
