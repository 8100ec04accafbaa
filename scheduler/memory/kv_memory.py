"""The KV of one sequence, from its admission to its end.

    open_request ──▶ extend ──▶ publish ──▶ extend ──▶ … ──▶ retain, or close
      │                    │                           │
    row, lock on        what is computed            a lease has it all, or the tree has
    what is cached      is shared, it continues     what is whole and the rest is free

Rows, allocator, tree and leases are used together only here. So two orders are written down only once: how memory is
reclaimed (evict, then break leases; then the caller retracts), and how a row changes (allocate, then write the row).
`PendingCopies` notes the copies that a fork or a cut needs. `BeamMemory` owns what the beams of a search hold after the
prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...memory_pool.allocator import Allocator
from ...memory_pool.req_to_token import ReqToTokenPool
from ...radix.cache import MatchResult, RadixCache
from ...radix.cuts import advance, fork_sequence, take_over, truncate
from ...radix.discarding import retire
from ...radix.history import CacheHistory
from ...radix.kv_sequence import KVSequence, SequenceEnd
from ...radix.lease import Lease, LeaseTable, LeaseTerms
from ...radix.node import StateKind
from ...radix.past_node import Pressure
from ...radix.tiers.host_tier import HostTier, TierCopy
from ..beam.rows import BeamKV
from ..jobs.kept_turn import KeptTurn, Worth
from ..request import Request
from .pending_copies import PendingCopies
from .state_memory import StateMemory
from .transfer_rates import TransferRates
from .window_memory import WindowMemory

MAX_SLACK = 512
"""Least number of tokens to evict at a time, or 1/256 of the pool if that is less: a full pool then does not evict anew
for every few tokens."""


_RUNNING = Pressure("", None)


class NotYet(Exception):
    """Memory will be free once the copies under way have ended."""


class KVMemory:
    """Opens, extends and closes the KV of requests. Owns the book of pending copies."""

    def __init__(
        self,
        req_to_token: ReqToTokenPool,
        allocator: Allocator,
        cache: RadixCache,
        leases: LeaseTable,
        tier: HostTier | None = None,
        host_rates: TransferRates | None = None,
        history: CacheHistory | None = None,
        step_tokens: int = 0,
    ) -> None:
        """tier: keeps KV on the host; None without a host tier. host_rates: decides whether loading from it is faster
        than computing again; None: it always is. history: is told for which request memory is found; None: none is
        kept. step_tokens: the most that a step computes; for layers with a window."""
        self.req_to_token = req_to_token
        self.allocator = allocator
        self.cache = cache
        self.leases = leases
        self.tier = tier
        windows = cache.windows
        self.copies = PendingCopies(req_to_token, windows.pages if windows is not None else None)
        self.states = StateMemory(cache, cache.states) if cache.states is not None else None
        """Slots of recurrent states; None for models without."""
        self.windows = WindowMemory(cache, windows, self.copies, step_tokens) if windows is not None else None
        """Slots of layers with a sliding window that have a pool of their own; None for models without."""
        self._host_rates = host_rates
        self._history = history or CacheHistory(cache, 0)
        self._loads: list[TierCopy] = []
        """Loads that were ordered since the last `take_tier_copies`."""
        self._least_eviction = min(MAX_SLACK, allocator.total_tokens // 256)

    @property
    def page_size(self) -> int:
        return self.allocator.page_size

    @property
    def available_tokens(self) -> int:
        """Tokens that an allocation could get without breaking a lease: free ones, those eviction would free, and those
        that leave as soon as they are copied (write-back only)."""
        return self.allocator.free_tokens + self.cache.evictable_tokens + self._leaving_tokens

    @property
    def _leaving_tokens(self) -> int:
        return self.cache.residency.leaving_tokens

    @property
    def returning_states(self) -> int:
        """Slots of recurrent states that will be free once the steps in flight have ended."""
        return self.states.returning if self.states is not None else 0

    def round_up(self, num_tokens: int) -> int:
        """``num_tokens`` in whole pages."""
        page = self.page_size
        return -(-num_tokens // page) * page

    # -- open ---------------------------------------------------------------------------------------------------------

    def open_request(self, request: Request, reserve: int, now: float) -> bool:
        """Give a waiting request its row and a lock on what is cached of it: its claimed lease, or the longest prefix.

        Succeeds only if the rest of its known tokens plus ``reserve`` tokens could be allocated without breaking a
        lease; else changes nothing. Raises NotYet if that has to wait for copies.
        """
        on_host, takes_over = 0, request.has_claim
        self._history.pressure = Pressure(request.spec.client, request.rid)
        try:
            if takes_over:
                opened = self._open_lease(request, reserve, now)
            else:
                opened, on_host = self._open_match(request, reserve)
        finally:
            self._history.pressure = None
        if opened is None:
            return False
        request.kv = opened
        request.note_found(opened.length, on_host)
        request.committed_len = request.scheduled_len = opened.length
        if request.inheritance is not None:
            request.inheritance.note_opened(takes_over)
        return True

    def open_idle_request(self, request: Request, idle_tick: int) -> bool:
        """As `open_request`, for a request that runs when no other does and may take nothing from others: it gets free
        slots, and those of KV that was not accessed after ``idle_tick``. Nothing is loaded from the host. If it
        succeeds, `extend` has all that it needs without evicting or breaking leases."""
        cache = self.cache
        if self.windows is not None and not self.windows.make_room(len(request.token_ids), idle_tick):
            return False
        match = cache.match_prefix(request.namespace, request.token_ids.view(0, request.prefix_limit))
        cache.lock(match.handle)
        try:
            needed = self.round_up(len(request.token_ids)) - match.device_len
            if needed > self.allocator.free_tokens:
                cache.evict(needed - self.allocator.free_tokens, idle_tick)
            has_room = needed <= self.allocator.spare_tokens and (self.states is None or self.states.has_free)
            row = self.req_to_token.alloc() if has_room else None
            if row is None:
                return False
            on_device = MatchResult(match.device_len, 0, match.handle)
            spec = request.spec
            request.kv = cache.open_sequence(request.namespace, on_device, row, spec.priority, spec.client)
        finally:
            cache.unlock(match.handle)
        request.committed_len = request.scheduled_len = request.kv.length
        return True

    def _open_match(self, request: Request, reserve: int) -> tuple[KVSequence | None, int]:
        """Returns the sequence, None if it does not fit, and the number of its tokens to load from the host."""
        ids, spec = request.token_ids.view(0, request.prefix_limit), request.spec
        match = self.cache.match_prefix(request.namespace, ids, after=request.prefix_node)
        request.prefix_node = None
        self.cache.lock(match.handle)  # what is locked no longer counts as evictable
        needed = self.round_up(len(request.token_ids)) - match.device_len + reserve
        has_room = needed <= self.available_tokens and self._can_begin(match, needed)
        row = self.req_to_token.alloc() if has_room else None
        if row is None:
            self.cache.unlock(match.handle)
            return None, 0
        try:
            whole = self._bring_back(match)
            if match.unused:
                request.state_points[match.device_len + match.host_len + match.unused] = StateKind.BRANCH
            opened = self.cache.open_sequence(request.namespace, whole, row, spec.priority, spec.client)
            return opened, whole.device_len - match.device_len
        except NotYet:
            self.req_to_token.free(row)
            raise
        finally:
            self.cache.unlock(match.handle)

    def _can_begin(self, match: MatchResult, needed: int) -> bool:
        """True if a sequence on this match can have a slot for the state after it, and those in the window pool for its
        first step. needed: tokens that it lacks."""
        if self.windows is not None:
            return self.windows.can_begin(match.device_len, needed)
        return self.states is None or match.device_len > 0 or self.states.available > 0

    def _bring_back(self, match: MatchResult) -> MatchResult:
        """Order what a match has on the host to the device, where it is from now on. Returns the match as it is then:
        the same, if there are no slots that can be written at once. Raises NotYet if there will be."""
        if self.tier is None or match.host_handle is None:
            return match
        if self._host_rates is not None and not self._host_rates.loading_pays():
            return match
        lowest = self.cache.tree.last_on_device(match.host_handle)
        self.cache.lock(lowest)  # where a state has left the device, KV may have stayed
        try:
            is_loading = self._order_load(match)
        finally:
            self.cache.unlock(lowest)
        return MatchResult(match.device_len + match.host_len, 0, match.host_handle) if is_loading else match

    def _order_load(self, match: MatchResult) -> bool:
        """Order the load of what a match has on the host. False, and nothing ordered, if there are no slots that can be
        written at once. Raises NotYet if there will be."""
        tier = self.tier
        assert tier is not None and match.host_handle is not None
        missing = tier.missing_tokens(match)
        self._evict_for(missing)
        if not tier.can_load(match):
            return False  # what had to leave the device took its place on the host
        none = np.zeros(1, dtype=np.int32)
        slots = self.allocator.alloc_extend(none, np.array([missing], dtype=np.int32), none)
        if slots is None and self._leaving_tokens:
            raise NotYet
        if slots is None:
            return False
        state = self.states.take_beside(match.handle) if self.states is not None else 0
        if state is None or self.copies.reads_slots(slots):
            self.allocator.free(slots)
            if state and self.cache.states is not None:
                self.cache.states.slots.drop(state)
            return False
        self._loads.append(tier.load_match(match, slots, state))
        return True

    def _open_lease(self, request: Request, reserve: int, now: float) -> KVSequence | None:
        """Take the claimed lease over, row, lock and partial page; or copy it, if the parent is to be kept."""
        inheritance = request.inheritance
        assert inheritance is not None and inheritance.lease is not None and inheritance.lease.kv is not None
        lease, kept = inheritance.lease, inheritance.lease.kv
        kept_length = kept.length
        length = min(kept_length, request.prefix_limit, inheritance.inherited_tokens)
        length = self.cache.usable_length(kept, length)
        whole = min(kept.tree_len, length - length % self.page_size)
        held = whole if inheritance.keep_parent or length < kept.tree_len else self.round_up(length)
        if self.round_up(len(request.token_ids)) - held + reserve > self.available_tokens:
            return None
        if self.states is not None and not self.states.can_continue(kept, length, inheritance.keep_parent):
            return None
        if self.windows is not None and not self.windows.can_continue(len(request.token_ids) - held):
            return None
        if not inheritance.keep_parent:
            kv = self.leases.hand_off(lease)
        else:
            kv = self._fork(kept, kept_length)
            if kv is None:
                return None
            self.leases.unclaim(lease, now)
            inheritance.copied = lease
        inheritance.lease = None
        self._cut(kv, length, lease.written_by)
        is_copied = inheritance.keep_parent and kv.length > kv.tree_len  # the next step writes the private part
        if length == kept_length and not is_copied:
            ids = request.token_ids.view(0, request.prefix_limit)
            advance(self.cache, kv, ids, fence=lease.written_by)
        take_over(self.cache, kv, request.spec.priority, request.spec.client)
        return kv

    def _cut(self, kv: KVSequence, length: int, fence: int | None) -> None:
        """Keep the first ``length`` tokens of a sequence. If the cut is inside a page of the tree, the part of it that
        stays is copied, so that nothing is computed again. fence: of a step that may still write to what is cut off."""
        if kv.length <= length:
            return
        length = self.cache.usable_length(kv, length)
        # A state is of whole pages, there or nowhere, and so is a window.
        in_tree = length < kv.tree_len and self.states is None and self.windows is None
        tail = self.req_to_token.rows[kv.row, length - length % self.page_size : length].copy()
        truncate(self.cache, kv, length, fence=fence)
        if not in_tree or not len(tail):
            return
        self._evict_for(self.page_size)
        old, new = np.array([kv.length], dtype=np.int32), np.array([length], dtype=np.int32)
        slots = self.allocator.alloc_extend(old, new, old)  # kv.length is whole pages: no last slot is needed
        if slots is not None:
            self.req_to_token.write(kv.row, kv.length, slots)
            kv.length = length
            self.copies.add_copies(kv, tail, slots)

    def _fork(self, kv: KVSequence, length: int) -> KVSequence | None:
        """As `fork_into`, in a row of its own."""
        row = self.req_to_token.alloc()
        if row is None:
            return None
        sequence = self.fork_into(kv, length, row)
        if sequence is None:
            self.req_to_token.free(row)
        return sequence

    def fork_into(self, kv: KVSequence, length: int, row: int) -> KVSequence | None:
        """Open a second sequence on the first ``length`` tokens, over the same locked path, in the caller's row. The
        next step copies the private part. None, and nothing changed, if there is no memory."""
        self._evict_for(self.round_up(length) - kv.tree_len)
        forked = fork_sequence(self.cache, kv, length, row)
        if forked is None:
            return None
        sequence, source, target = forked
        if len(source):
            self.copies.add_copies(sequence, source, target, owner=kv)
        return sequence

    # -- extend -------------------------------------------------------------------------------------------------------

    def extend(self, request: Request, new_len: int, now: float) -> np.ndarray | None:
        """Allocate slots for a request's tokens up to ``new_len``; evict and break leases if need be.

        Returns int32 [new tokens] and has written the row, or None and has allocated nothing.
        """
        kv, old_len = request.held_kv, request.scheduled_len
        old_lens, new_lens = np.array([old_len], dtype=np.int32), np.array([new_len], dtype=np.int32)
        last = max(old_len - 1, 0)
        last_slots = self.req_to_token.rows[kv.row, last : last + 1]
        if not self.reserve_states([request], now):
            return None
        self._history.pressure = Pressure(request.spec.client, request.rid)
        try:
            self.reclaim(self.allocator.tokens_needed(old_lens, new_lens), now)
        finally:
            self._history.pressure = None
        slots = self.allocator.alloc_extend(old_lens, new_lens, last_slots)
        if slots is not None:
            self.req_to_token.write(kv.row, old_len, slots)
            kv.length = new_len
        return slots

    def reserve_states(self, requests: Sequence[Request], now: float, *, is_decode: bool = False) -> bool:
        """Have a slot for the state that the next step of each request leaves behind; evict and break leases if need
        be. False if there is none: some have one then, and keep it. is_decode: the step gives these one token each, and
        has no other rows."""
        while self.states is not None and not self.states.reserve_each(requests, is_decode=is_decode):
            lease = self.leases.least_valuable(now)
            if lease is None:
                return False
            self.break_lease(lease)
        return True

    def reserve_beam_states(self, beams: BeamKV, now: float) -> bool:
        """Likewise for each beam of a search, which has its row. False, and nothing reserved, if there are too few."""
        while self.states is not None and not self.states.reserve_beams(beams):
            lease = self.leases.least_valuable(now)
            if lease is None:
                return False
            self.break_lease(lease)
        return True

    def reserve_drafts(self, requests: Sequence[Request], drafts: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """Have slots for the states before each guess, for requests with `reserve_states`: drafts are int32 [k] for
        each, and none are none. Returns the drafts, shorter where slots are lacking; None if none are left."""
        if self.states is None:
            return list(drafts) or None
        wanted = [len(draft) for draft in drafts] or [0] * len(requests)
        room = [self.states.reserve_drafts(r.held_kv.states, count) for r, count in zip(requests, wanted, strict=True)]
        return [draft[:count] for draft, count in zip(drafts, room)] if any(room) else None

    def extend_rows(self, rows: np.ndarray, lengths: np.ndarray, now: float) -> np.ndarray | None:
        """Allocate one more slot for each row (int32 [n], each once) after its first ``lengths`` (int32 [n]); otherwise
        as `extend`. The caller updates the lengths of the sequences."""
        last_slots = self.req_to_token.rows[rows, np.maximum(lengths - 1, 0)]
        self.reclaim(self.allocator.tokens_needed(lengths, lengths + 1), now)
        slots = self.allocator.alloc_extend(lengths, lengths + 1, last_slots)
        if slots is not None:
            self.req_to_token.write_many(rows, lengths, slots)
        return slots

    def reclaim(self, needed: int, now: float) -> None:
        """Free memory for what already runs: evict, then break leases, until ``needed`` tokens are free or nothing is
        left to give way."""
        self._evict_for(needed)
        while needed > self.allocator.spare_tokens + self._leaving_tokens:
            lease = self.leases.least_valuable(now)
            if lease is None:
                return
            self.break_lease(lease)
            self._evict_for(needed)

    def break_lease(self, lease: Lease) -> None:
        """Break a lease to free memory. KV that only a first turn had in the cache is then evicted before all else: a
        conversation that has come back before is likelier to do so again, though its lease is gone too."""
        assert lease.kv is not None and lease.kv.node is not None
        node, kept = lease.kv.node, lease.owner
        self.leases.break_lease(lease)
        if isinstance(kept, KeptTurn) and kept.worth is Worth.FIRST_TURN:
            shared = kept.job.shared_tokens if kept.job is not None else None
            retire(self.cache, node, shared or 0, how=SequenceEnd.FINISHED)

    def _evict_for(self, needed: int) -> None:
        """Evict until ``needed`` tokens are free, or nothing is left to evict."""
        if self.windows is not None:
            self.windows.make_room(needed)
        short = needed - self.allocator.free_tokens
        if short <= 0:
            return
        history, one = self._history, self._history.pressure
        history.pressure = one or _RUNNING
        try:
            self.cache.evict(max(short, self._least_eviction))
        finally:
            history.pressure = one

    # -- copies between tiers ----------------------------------------------------------------------------------------

    def take_tier_copies(self) -> list[TierCopy]:
        """The copies to be made now, loads first. Steps formed before this call may read what the loads bring."""
        if self.tier is None:
            return []
        stores = self.tier.next_stores()
        loads, self._loads = self._loads, []
        return loads + stores

    @property
    def copies_under_way(self) -> int:
        """Copies between the tiers that have not ended. What they read or write cannot be evicted."""
        return len(self.tier.under_way) if self.tier is not None else 0

    def users_of(self, load: TierCopy, requests: Iterable[Request]) -> list[Request]:
        """The requests that hold some of the slots that a load was to fill. Leases that do break."""
        rows, slots, state = self.req_to_token.rows, load.device_slots, load.device_state

        def uses(kv: KVSequence, beams: BeamKV | None = None) -> bool:
            if state and state in (*kv.states.names(), *(beams.state_names() if beams is not None else ())):
                return True
            return bool(np.isin(rows[kv.row, : kv.length], slots).any())

        for lease in self.leases.live():
            if lease.kv is not None and uses(lease.kv):
                self.leases.break_lease(lease)
        return [request for request in requests if request.kv is not None and uses(request.kv, request.beam_kv)]

    # -- publish, retain, close ---------------------------------------------------------------------------------------

    def publish(self, request: Request) -> None:
        """Share the KV that a request has computed so far, and the states where others are expected to continue; the
        request keeps running."""
        if self.windows is not None:
            self._publish_windows(request)
        self.cache.cache_unfinished_req(request.held_kv, request.token_ids.view(0, request.committed_len))
        if request.state_points:
            self._leave_states(request)

    def _leave_states(self, request: Request) -> None:
        """Leave the states where others are expected to continue, as far as the tree has what a request has computed. A
        request may also end in the step that computes its prompt, and leaves them then."""
        kv, page = request.held_kv, self.page_size
        for point in [point for point in request.state_points if point <= request.committed_len]:
            kind = request.state_points.pop(point)
            self.cache.leave_state(kv, kv.open_node(), kind, point - point % page)

    def _publish_windows(self, request: Request) -> None:
        """Share the windows before the places where others are expected to continue, while the request holds them."""
        kv, page = request.held_kv, self.page_size
        for point in sorted(request.state_points):
            end = point - point % page
            if kv.tree_len < end <= request.committed_len:
                self.cache.cache_unfinished_req(kv, request.token_ids.view(0, end))

    def retain(self, request: Request, length: int, terms: LeaseTerms, fence: int | None) -> tuple[Lease | None, int]:
        """End a request but keep its first ``length`` tokens under a lease. None if that would exceed a budget: then
        the request has ended as with `close_request`, and a tier keeps so many tokens."""
        kv = request.held_kv
        length = min(length, request.committed_len)
        ids = request.token_ids.view(0, length)
        in_flight = fence if request.scheduled_len > request.committed_len else None
        if kv.tree_len <= length:
            self.cache.cache_unfinished_req(kv, ids)
        if request.state_points:
            self._leave_states(request)
        truncate(self.cache, kv, length, fence=in_flight)
        self.cache.leave_state(kv, kv.open_node(), StateKind.TURN_END, turns_kept=request.spec.retain_states)
        self.settle(request)
        lease, demoted = self.leases.grant(kv, terms, written_by=in_flight), 0
        if lease is None:
            demoted = self.demote(kv)
            self.cache.release(kv, fence=in_flight)
        self._forget(request)
        return lease, demoted

    def exchange_lease(self, lease: Lease, request: Request, kept: int) -> bool:
        """End a request and have a lease keep its KV in place of what it kept; of that, the tokens after the first
        ``kept`` are then evicted before all else. Returns False, and the request continues, if the lease cannot take
        it."""
        kv, old = request.held_kv, lease.kv.node if lease.kv is not None else None
        if kv.length > request.committed_len or self.copies.has_copies(kv):
            return False
        self.publish(request)
        self.cache.leave_state(kv, kv.open_node(), StateKind.TURN_END)
        self.settle(request)
        if not self.leases.exchange(lease, kv):
            return False
        if old is not None and kept:
            retire(self.cache, old, kept)
        self._forget(request)
        return True

    def lease_cached(self, namespace: str, ids: np.ndarray, terms: LeaseTerms) -> Lease | None:
        """Lease what the cache has of a sequence that has ended, int32 [n], in whole pages. None if it has nothing, if
        the lease would exceed a budget, or with a tier below: that has taken the sequence over (`demote`)."""
        match = self.cache.match_prefix(namespace, ids) if self.tier is None else None
        row = self.req_to_token.alloc() if match is not None and match.device_len else None
        if match is None or row is None:
            return None
        kv = self.cache.open_sequence(namespace, match, row)
        lease = self.leases.grant(kv, terms)
        if lease is None:
            self.cache.release(kv)
        return lease

    def demote(self, kv: KVSequence) -> int:
        """Have a tier keep what the tree has of a sequence. Returns how many tokens one promises to: 0 if none does."""
        if self.tier is None or kv.node is None:
            return 0
        self.tier.path_demoted(kv.node)
        return self.tier.promised_tokens(kv.node)

    def lease_copy(self, request: Request, terms: LeaseTerms) -> Lease | None:
        """Lease a copy of what a running request has computed by now; None if there is no room. The request runs on."""
        if not self.leases.make_room(terms):  # it needs a row
            return None
        self.publish(request)
        kv = self._fork(request.held_kv, request.committed_len)
        if kv is None:
            return None
        lease = self.leases.grant(kv, terms)
        if lease is None:
            self.cache.release(kv)
        return lease

    def close_request(self, request: Request, fence: int | None) -> None:
        """Hand the committed tokens to the tree and free the rest, with the row.

        fence: that of a step in flight, which still writes the slots beyond the committed ones; they return after it.
        """
        kv = request.held_kv
        in_flight = fence if request.scheduled_len > request.committed_len else None
        committed = request.committed_len
        if self.copies.has_copies(kv):
            committed = kv.tree_len  # its KV behind the tree still had to be copied, and never will be
        elif self.states is not None and any(point <= committed for point in request.state_points):
            self.publish(request)
        ended = request.finish is not None and request.finish.type != "abort" and request.spec.pooling is None
        kind = StateKind.TURN_END if ended else StateKind.PASSING
        self.cache.cache_finished_req(
            kv,
            request.token_ids.view(0, committed),
            fence=in_flight,
            kind=kind,
            turns_kept=request.spec.retain_states,
        )
        self._forget(request)

    def discard_all_kv(self) -> None:
        """Forget all KV, leased KV too, as if the pools were new. No live request may hold any."""
        self.leases.discard_leases()
        self.cache.discard_all()
        self.copies.clear_copies()

    def close_fence(self, fence: int) -> None:
        """Close the fence of a step that has ended, and free the pages that only waited for it."""
        self.allocator.fences.close_fence(fence)
        self.allocator.release_quarantine()
        if self.cache.states is not None:
            self.cache.states.slots.release_quarantine()

    def settle(self, request: Request) -> None:
        """After the last step of a request: give up the states, and the slots behind windows, that nothing can use any
        more."""
        self.settle_window(request)
        self.settle_states(request)

    def settle_window(self, request: Request) -> None:
        """After a step of a request: give up the slots behind windows that nothing can use any more."""
        kv = request.held_kv
        self.cache.leave_window(kv, min(request.committed_len, kv.length))

    def settle_states(self, request: Request) -> None:
        """Likewise the states."""
        held = request.held_kv.states.held
        if self.states is not None and len(held) > 1 and held[1].length <= request.committed_len:
            self.states.settle(request)

    def cut_states(self, request: Request, length: int, fence: int | None) -> None:
        """A request that ends here leaves the state of its first ``length`` tokens in the tree, if it has that, and no
        later one: what was cut off after them is in no later prompt. fence: see `close_request`."""
        if self.cache.states is not None and request.beam_kv is None:
            states, slots = request.held_kv.states, self.cache.states.slots
            if states.longest_within(length, self.page_size) is not None:
                states.cut(slots, length, fence if request.scheduled_len > request.committed_len else None)

    def drop_states(self, request: Request) -> None:
        """A request that is about to end names no state any more, but for those that a step in flight may write."""
        if self.cache.states is not None:
            request.held_kv.states.forget(self.cache.states.slots, request.committed_len)

    def _forget(self, request: Request) -> None:
        request.kv = None
        request.committed_len = request.scheduled_len = 0


def retire_unwanted(cache: RadixCache, request: Request) -> None:
    """Mark the KV of an ended request beyond its ``no_reuse_from`` to be evicted before all else. A request that never
    began computed nothing, so the KV of other requests stays as it is."""
    if request.spec.no_reuse_from is not None and request.queried:
        node, _, _ = cache.find_prefix(request.namespace, request.token_ids.view())
        retire(cache, node, request.spec.no_reuse_from, leased=True)


def take_back_unfilled(rows: np.ndarray, slots: np.ndarray, requests: Iterable[Request]) -> list[Request]:
    """The requests that hold some of these slots, int32 [n], which a failed step was to fill by copies. What they hold
    beyond the tree is not there: it counts as never committed, so that none of it is shared when they end.

    rows: those of the request rows' pool.
    """
    unfilled: list[Request] = []
    for request in requests:
        if request.kv is None:
            continue
        private = rows[request.kv.row, request.kv.tree_len : request.kv.length]
        if np.isin(private, slots).any():
            request.committed_len = min(request.committed_len, request.kv.tree_len)
            unfilled.append(request)
    return unfilled
