"""The scheduler's hands on KV memory: open, extend and close what a request holds.

The only place where rows, allocator, tree and leases are used together, so that the order in which memory is reclaimed
(evict, then break leases; the caller retracts) and the order of a change (allocate, then write the row) are written
once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..memory_pool.allocator import Allocator
from ..memory_pool.req_to_token import ReqToTokenPool
from ..radix.cache import KVSequence, RadixCache
from ..radix.lease import Lease, LeaseTable
from .batch import KVCopies
from .beam.memory import BeamRows
from .beam.search import Hypothesis
from .request import Request


class KVMemory:
    """Opens, extends and closes the KV of requests. Owns the copies that the next step has to make."""

    def __init__(
        self, req_to_token: ReqToTokenPool, allocator: Allocator, cache: RadixCache, leases: LeaseTable
    ) -> None:
        self.req_to_token = req_to_token
        self.allocator = allocator
        self.cache = cache
        self.leases = leases
        self.beam_rows = BeamRows(req_to_token, allocator)
        self._copies: dict[int, tuple[KVSequence, KVCopies]] = {}
        """By row: whose tokens are copied, and what. A sequence that is closed before the step needs them no more."""
        self._beam_copies: dict[Request, KVCopies] = {}
        """The same of beam searches that have forked."""

    @property
    def page_size(self) -> int:
        return self.allocator.page_size

    @property
    def total_tokens(self) -> int:
        return self.allocator.total_tokens

    @property
    def available_tokens(self) -> int:
        """Tokens that an allocation could get without breaking a lease: free ones and those eviction would free."""
        return self.allocator.free_tokens + self.cache.evictable_tokens

    def round_up(self, num_tokens: int) -> int:
        """``num_tokens`` in whole pages."""
        page = self.page_size
        return -(-num_tokens // page) * page

    # -- open ---------------------------------------------------------------------------------------------------------

    def open(self, request: Request, reserve: int | None, now: float) -> bool:
        """Give a waiting request its row and a lock on what is cached of it: its claimed lease, or the longest prefix.

        Succeeds only if the rest of its known tokens plus ``reserve`` tokens could be allocated; else changes nothing.
        A ``reserve`` of None means that nothing else runs: then leases are broken until the request fits.
        """
        while not self._try_open(request, reserve or 0, now):
            if reserve is not None:
                return False
            claimed = request.inheritance.lease if request.inheritance is not None else None
            if not (self.leases.break_one(now, spare=claimed) or self.leases.break_one(now)):
                return False
        return True

    def _try_open(self, request: Request, reserve: int, now: float) -> bool:
        opened = self._open_lease(request, reserve, now) if request.has_claim else self._open_match(request, reserve)
        if opened is None:
            return False
        request.kv = opened
        request.committed_len = request.scheduled_len = opened.length
        if request.inheritance is not None:
            request.inheritance.lost_claim()
        return True

    def _open_match(self, request: Request, reserve: int) -> KVSequence | None:
        match = self.cache.match_prefix(request.namespace, request.token_ids.view(0, request.prefix_limit))
        self.cache.lock(match.handle)  # what is locked no longer counts as evictable
        needed = self.round_up(len(request.token_ids)) - match.device_len + reserve
        row = self.req_to_token.alloc() if needed <= self.available_tokens else None
        opened = self.cache.open_sequence(request.namespace, match, row) if row is not None else None
        self.cache.unlock(match.handle)
        return opened

    def _open_lease(self, request: Request, reserve: int, now: float) -> KVSequence | None:
        """Take the claimed lease over, row, lock and partial page; or copy it, if the parent is to be kept."""
        inheritance = request.inheritance
        assert inheritance is not None and inheritance.lease is not None and inheritance.lease.kv is not None
        lease, kept = inheritance.lease, inheritance.lease.kv
        length = min(kept.length, request.prefix_limit)
        whole = min(kept.tree_len, length - length % self.page_size)
        held = whole if inheritance.keep_parent or length < kept.tree_len else self.round_up(length)
        if self.round_up(len(request.token_ids)) - held + reserve > self.available_tokens:
            return None
        if not inheritance.keep_parent:
            kv = self.leases.hand_off(lease)
        else:
            kv = self._fork(kept, kept.length)
            if kv is None:
                return None
            self.leases.unclaim(lease, now)
        inheritance.lease = None
        self._cut(kv, request.token_ids.view(), length)
        return kv

    def _cut(self, kv: KVSequence, token_ids: np.ndarray, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence. What the cut leaves of a page of the tree is copied, so that
        nothing of it is computed again."""
        if kv.length <= length:
            return
        in_tree = length < kv.tree_len
        tail = self.req_to_token.rows[kv.row, length - length % self.page_size : length].copy()
        self.cache.truncate(kv, token_ids, length)
        if not in_tree or not len(tail):
            return
        self._make_free(self.page_size)
        old, new = np.array([kv.length], dtype=np.int32), np.array([length], dtype=np.int32)
        slots = self.allocator.alloc_extend(old, new, old)  # kv.length is whole pages: no last slot is needed
        if slots is not None:
            self.req_to_token.write(kv.row, kv.length, slots)
            kv.length = length
            self._copies[kv.row] = (kv, KVCopies(tail, slots))

    def _fork(self, kv: KVSequence, length: int) -> KVSequence | None:
        """A second sequence on the same locked path; what is private is copied before the next step."""
        row = self.req_to_token.alloc()
        if row is None:
            return None
        sequence = self._fork_into(kv, length, row)
        if sequence is None:
            self.req_to_token.free(row)
        return sequence

    def _fork_into(self, kv: KVSequence, length: int, row: int) -> KVSequence | None:
        self._make_free(self.round_up(length) - kv.tree_len)
        forked = self.cache.fork_sequence(kv, length, row)
        if forked is None:
            return None
        sequence, source, target = forked
        if len(source):
            self._copies[row] = (sequence, KVCopies(self._once_copied(kv, source), target))
        return sequence

    # -- extend -------------------------------------------------------------------------------------------------------

    def extend(self, request: Request, new_len: int, now: float) -> np.ndarray | None:
        """Slots for the tokens of a request up to ``new_len``; evicts and breaks leases if need be.

        Returns int32 [new tokens] and has written the row, or None and has allocated nothing.
        """
        kv, old_len = request.held_kv, request.scheduled_len
        old_lens, new_lens = np.array([old_len], dtype=np.int32), np.array([new_len], dtype=np.int32)
        last = max(old_len - 1, 0)
        last_slots = self.req_to_token.rows[kv.row, last : last + 1]
        self._make_free(self.allocator.tokens_needed(old_lens, new_lens), break_at=now)
        slots = self.allocator.alloc_extend(old_lens, new_lens, last_slots)
        if slots is not None:
            self.req_to_token.write(kv.row, old_len, slots)
            kv.length = new_len
        return slots

    def extend_by_one(self, requests: list[Request], searches: list[Request], now: float) -> np.ndarray | None:
        """One slot for each request, then one for each beam of each search, which has been forked; as `extend`."""
        rows = [np.fromiter((r.held_kv.row for r in requests), dtype=np.int32, count=len(requests))]
        old_lens = [np.fromiter((r.scheduled_len for r in requests), dtype=np.int32, count=len(requests))]
        for search in searches:
            rows.append(search.held_beams.rows)
            old_lens.append(np.full(len(rows[-1]), search.held_beams.length, dtype=np.int32))
        all_rows, all_lens = np.concatenate(rows), np.concatenate(old_lens)
        last_slots = self.req_to_token.rows[all_rows, np.maximum(all_lens - 1, 0)]
        self._make_free(self.allocator.tokens_needed(all_lens, all_lens + 1), break_at=now)
        slots = self.allocator.alloc_extend(all_lens, all_lens + 1, last_slots)
        if slots is None:
            return None
        self.req_to_token.write_many(all_rows, all_lens, slots)
        for request, old in zip(requests, old_lens[0].tolist()):
            request.held_kv.length = old + 1
        for search in searches:
            search.held_beams.length += 1
        return slots

    def _make_free(self, needed: int, *, break_at: float | None = None) -> None:
        """Evict until ``needed`` tokens are free, or nothing is left to evict. Leases break only if the caller says at
        what time."""
        while (short := needed - self.allocator.free_tokens) > 0:
            self.cache.evict(short)
            if needed <= self.allocator.free_tokens or break_at is None or not self.leases.break_one(break_at):
                return

    def take_copies(self, searches: Sequence[Request] = ()) -> list[KVCopies]:
        """The copies that the step now formed has to make before it computes anything.

        searches: those it computes. The copies of others wait for a step of their own: a search lives on if a step it
        has no part in fails.
        """
        copies = [self._still_wanted(kv, copies) for kv, copies in self._copies.values() if kv.node is not None]
        copies += [self._beam_copies.pop(search) for search in searches if search in self._beam_copies]
        self._copies.clear()
        return copies

    def drop_copies(self) -> None:
        """Nobody needs what waits to be copied."""
        self._copies.clear()
        self._beam_copies.clear()

    def _still_wanted(self, kv: KVSequence, copies: KVCopies) -> KVCopies:
        """Without those whose target the sequence has given back since."""
        named = np.isin(copies.target, self.req_to_token.rows[kv.row, : kv.length])
        return copies if named.all() else KVCopies(copies.source[named], copies.target[named])

    def _once_copied(self, kv: KVSequence, source: np.ndarray) -> np.ndarray:
        """Where the K and V are now that ``kv`` names in ``source``: a copy into its slots may still be waiting for the
        next step, which reads all sources before it writes any target."""
        copies = self._pending_copies(kv)
        if copies is None:
            return source
        order = np.argsort(copies.target)
        place = order[np.searchsorted(copies.target, source, sorter=order).clip(max=len(order) - 1)]
        return np.where(copies.target[place] == source, copies.source[place], source)

    def _pending_copies(self, kv: KVSequence) -> KVCopies | None:
        """What waits to be copied into the sequence."""
        holder, copies = self._copies.get(kv.row, (None, None))
        return copies if holder is kv else None

    # -- beam searches ------------------------------------------------------------------------------------------------

    def start_search(self, request: Request) -> None:
        """The prompt is computed: from now on the beams hold what comes behind its whole pages."""
        assert request.beams is not None
        request.beam_kv = self.beam_rows.adopt(request.held_kv, request.beams.num_live)
        request.committed_len = request.scheduled_len = request.held_kv.length

    def fork_beams(self, search: Request, now: float) -> bool:
        """Give each beam of the next step its row; False, and nothing changed, if there is no memory."""
        kv = search.held_beams
        if kv.is_forked:
            return True
        self._make_free(self.beam_rows.tokens_to_fork(kv), break_at=now)
        copies = self.beam_rows.fork_rows(kv)
        if copies is None:
            return False
        if len(copies):
            self._beam_copies[search] = copies
        return True

    def keep_finished(self, search: Request, finished: list[tuple[Hypothesis, int]]) -> None:
        """Note where the KV of sequences that have just finished is; with each comes the beam it went on from."""
        kv = search.held_beams
        for hypothesis, parent in finished:
            hypothesis.slots = self.req_to_token.rows[kv.rows[parent], kv.start : kv.length].copy()

    def choose_beams(self, search: Request, parents: np.ndarray) -> None:
        """The search goes on from these beams (int32 [n]). The KV of finished sequences is kept only for a lease."""
        assert search.beams is not None
        kept: list[np.ndarray] = []
        for rank, hypothesis in enumerate(search.beams.finished):
            if rank >= search.spec.num_retained:
                hypothesis.slots = None  # a rank only ever gets worse
            elif hypothesis.slots is not None:
                kept.append(hypothesis.slots)
        self.beam_rows.choose(search.held_beams, parents, kept)

    def retain_results(self, search: Request, results: list[Hypothesis], deadline: float) -> list[Lease | None]:
        """A lease on each finished sequence, as far as its KV is still there: at least the prompt's. None where a
        budget or the pool has no room for it. The search itself goes on holding what it holds."""
        trunk = search.held_kv
        prompt_slots = self.req_to_token.rows[trunk.row, : trunk.length].copy()
        leases: list[Lease | None] = []
        for hypothesis in results:
            row = self.req_to_token.alloc() if len(self.leases) < self.leases.max_leases else None
            if row is None:
                leases.append(None)
                continue
            slots = hypothesis.slots if hypothesis.slots is not None else prompt_slots[:0]
            self.req_to_token.write(row, 0, prompt_slots)
            self.req_to_token.write(row, trunk.length, slots)
            length = min(trunk.length + len(slots), search.prompt_len + hypothesis.kept_tokens)
            view = KVSequence(trunk.namespace, row, trunk.node, trunk.tree_len, length)
            forked = self._fork_into(view, length, row)
            lease = self.leases.grant(forked, deadline) if forked is not None else None
            if forked is None:
                self.req_to_token.free(row)
            elif lease is None:
                self.cache.release(forked)
            leases.append(lease)
        return leases

    # -- publish, retain, close ---------------------------------------------------------------------------------------

    def publish(self, request: Request) -> None:
        """Let others share what a request has computed so far; it goes on."""
        self.cache.cache_unfinished_req(request.held_kv, request.token_ids.view(0, request.committed_len))

    def retain(self, request: Request, length: int, deadline: float, quarantine_step: int | None) -> Lease | None:
        """End a request but keep its first ``length`` tokens under a lease. None if that would exceed a budget: then
        the request has ended as by `close`."""
        kv = request.held_kv
        length = min(length, request.committed_len)
        ids = request.token_ids.view(0, length)
        in_flight = quarantine_step if request.scheduled_len > request.committed_len else None
        if kv.tree_len <= length:
            self.cache.cache_unfinished_req(kv, ids)
        self.cache.truncate(kv, ids, length, quarantine_step=in_flight)
        lease = self.leases.grant(kv, deadline, written_by=in_flight)
        if lease is None:
            self.cache.release(kv, quarantine_step=in_flight)
        self._forget(request)
        return lease

    def lease_copy(self, request: Request, deadline: float) -> Lease | None:
        """A lease on what a running request has computed by now, beside it; None if there is no room for that."""
        self.publish(request)
        kv = self._fork(request.held_kv, request.committed_len)
        if kv is None:
            return None
        lease = self.leases.grant(kv, deadline)
        if lease is None:
            self.cache.release(kv)
        return lease

    def close(self, request: Request, quarantine_step: int | None) -> None:
        """Hand the committed tokens to the tree and free the rest, with the row.

        quarantine_step: a step in flight still writes the slots beyond the committed ones; they return after it.
        """
        kv = request.held_kv
        if request.beam_kv is not None:
            self._close_beams(request, quarantine_step if request.num_output_placeholders else None)
        in_flight = quarantine_step if request.scheduled_len > request.committed_len else None
        committed = request.committed_len
        if self._pending_copies(kv) is not None:
            committed = kv.tree_len  # what is to be copied is not there yet, and never will be
        self.cache.cache_finished_req(kv, request.token_ids.view(0, committed), quarantine_step=in_flight)
        self._forget(request)

    def _close_beams(self, search: Request, quarantine_step: int | None) -> None:
        self.beam_rows.close(search.held_beams, search.held_kv, quarantine_step)
        search.beam_kv = None
        self._beam_copies.pop(search, None)
        assert search.beams is not None
        for hypothesis in search.beams.finished:
            hypothesis.slots = None

    def _forget(self, request: Request) -> None:
        request.kv = None
        request.committed_len = request.scheduled_len = 0
