"""Recovery from an exception in the middle of a decision: the request at fault ends, all others continue.

An exception leaves state half changed: a request that is in no queue, a lock without a holder, a page without an owner,
a step that was never formed. So nothing is undone step by step. Instead the live requests, the leases, the structure of
the tree and the steps in flight count as the truth, and all else is derived from them anew:

    end      the requests at fault, with an error; children that wait for them, too
    place    every other request where its status says; one that fell between two places waits again, as if retracted
    rewind   what a step that was not formed had counted (`scheduled_len`, placeholders, slots)
    recount  locks, leases and their budget, rows, pages, fences; pages that may still be written wait in quarantine

Only where the tree's structure is broken, or a page has two owners, does every request that holds KV fail, as after
`memory/self_check.py`. Where the recovery itself raises, every request ends and the cache starts afresh. All of it
costs a look at the whole pool, which an exception is worth.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from ..radix.invariants import InvariantError, check_host
from ..radix.kv_sequence import KVSequence
from ..radix.repair import is_sound, restore_tree, slots_of_tree
from .batch_builder import PlannedStep
from .beam.rows import NO_STATES
from .continuation.continuations import Continuations
from .continuation.refusals import failed_parent
from .decode import DecodeScheduler
from .memory.beam_memory import BeamMemory
from .memory.kv_memory import KVMemory
from .memory.self_check import held_windows, named_states
from .offload import OffloadScheduler
from .outcome import FinishReason, RequestRefused
from .pins import PinManager
from .prefill import PrefillScheduler
from .queues import LiveRequests, WaitingQueue
from .request import Request, RequestEvent, RequestStatus
from .speculation.speculation import Speculation

logger = logging.getLogger(__name__)


def request_failed(error: Exception) -> RequestRefused:
    """The error for the client of a request at fault."""
    if isinstance(error, RequestRefused):
        return error
    return RequestRefused(
        f"this request failed inside the server ({type(error).__name__}); other requests are not affected. Send it "
        "again, and report it if it fails again",
        code="request_failed",
    )


class Recovery:
    """Owns nothing: it repairs the state of the other components."""

    def __init__(
        self,
        memory: KVMemory,
        beams: BeamMemory,
        live: LiveRequests,
        waiting: WaitingQueue,
        offload: OffloadScheduler,
        prefill: PrefillScheduler,
        decode: DecodeScheduler,
        continuations: Continuations,
        pins: PinManager,
        speculation: Speculation,
    ) -> None:
        self._memory, self._beams, self._live, self._waiting = memory, beams, live, waiting
        self._offload, self._prefill, self._decode = offload, prefill, decode
        self._continuations, self._pins, self._speculation = continuations, pins, speculation

    def recover(
        self,
        at_fault: Sequence[Request],
        refusal: RequestRefused,
        steps: Sequence[tuple[PlannedStep, set[Request]]],
        closed: list[int],
        events: list[RequestEvent],
        now: float,
    ) -> None:
        """End the live requests at fault, siblings and waiting children included, and put everything else right.

        steps: in flight, each with the requests that its result has reached already. closed: gets the serials that a
        step has opened. events: gets the ends. If this raises, call `end_all`.
        """
        self._end_families(at_fault, refusal, closed, events)
        flying = {request for request in self._live if _rewind(request, steps)}
        if self._memory.states is not None:
            stateless = [request for request in self._live if request.kv is not None and not _has_state(request)]
            self._end_families([request for request in stateless if request in flying], refusal, closed, events)
            for request in stateless:
                if request.finish is None:
                    request.requeue()
        self._place(flying.intersection(self._live))
        try:
            self._recount([step for step, _ in steps], now)
        except Exception:
            logger.exception("the KV cache cannot be repaired and is reset; all requests that hold KV fail")
            holders = [request for request in self._live if request.kv is not None]
            self._end_families(holders, refusal, closed, events)
            self._memory.discard_all_kv()

    def end_all(self, refusal: RequestRefused, closed: list[int], events: list[RequestEvent]) -> None:
        """End every request and start afresh with an empty cache: for an exception in `recover` itself. events: of
        those that have ended already; gets all others."""
        ended = {event.request for event in events}
        for request in [request for request in self._live if request not in ended]:
            events.append(self._end(request, refusal, closed))
        self._waiting.replace_requests([])
        self._offload.keep_loading(set())
        self._prefill.resume_prefilling(None)
        self._decode.keep_running(lambda request: False)
        self._memory.discard_all_kv()

    def forget_refused(self, requests: Sequence[Request]) -> None:
        """Forget requests that were never taken in."""
        for request in requests:
            _try(lambda request=request: self._pins.discard_request(request, []))
            _try(lambda request=request: self._continuations.unpark_child(request))

    # -- requests -----------------------------------------------------------------------------------------------------

    def _end_families(
        self, at_fault: Sequence[Request], refusal: RequestRefused, closed: list[int], events: list[RequestEvent]
    ) -> None:
        """End the live ones of these requests, their siblings, and every request that cannot continue."""
        rids = dict.fromkeys(request.rid for request in at_fault)
        doomed = {request: refusal for rid in rids for request in self._live.siblings_of(rid)}
        self._find_lost(doomed, refusal)
        while doomed:
            for request, why in doomed.items():
                events.append(self._end(request, why, closed))
            doomed = {}
            self._find_lost(doomed, refusal)

    def _find_lost(self, doomed: dict[Request, RequestRefused], refusal: RequestRefused) -> None:
        """Add the live requests that cannot continue: half ended, not begun, with KV that is not theirs, or waiting for
        a parent that is gone."""
        for request in self._live:
            if request not in doomed and self._is_lost(request):
                doomed |= dict.fromkeys(self._live.siblings_of(request.rid), refusal)
        for request in self._live:
            if request.status is RequestStatus.PARKED and request not in doomed:
                continuation = request.spec.continuation
                assert continuation is not None
                siblings = self._live.siblings_of(continuation.parent_rid)
                parent = next((p for p in siblings if p.is_search or p.index == continuation.index), None)
                if parent is None or parent in doomed:
                    gone = FinishReason(type="abort", message=refusal.message)
                    doomed[request] = failed_parent(continuation.parent_rid, gone)

    def _is_lost(self, request: Request) -> bool:
        if request.finish is not None:
            return True
        if request.status is RequestStatus.PARKED:
            continuation = request.spec.continuation
            return continuation is None or request not in self._continuations.waiting_for(
                continuation.parent_rid, continuation.index
            )
        if request.is_search and request.beams is None:
            return True  # its prompt was not set
        if request.kv is None:
            return request.status is RequestStatus.FINISHED
        return not is_sound(self._memory.cache, request.kv)

    def _end(self, request: Request, refusal: RequestRefused, closed: list[int]) -> RequestEvent:
        """Remove a request from every queue and table. `_recount` finds and frees the memory that it holds."""
        request.fail(refusal.message)
        self._waiting.discard_request(request)
        self._offload.discard_loading(request)
        self._prefill.stop_prefilling(request)
        self._decode.keep_running(lambda other: other is not request)
        self._live.discard_request(request)
        if request.is_open and request.serial not in closed:
            closed.append(request.serial)
        for forget in (
            lambda: self._speculation.discard_sequence(request),
            lambda: self._pins.discard_request(request, self._live.siblings_of(request.rid)),
            lambda: self._continuations.discard_request(request),
        ):
            _try(forget)
        return RequestEvent(request, finish=request.finish, refusal=refusal)

    def _place(self, flying: set[Request]) -> None:
        """Put every live request in exactly one queue or set, and remove all others. flying: requests in a step."""
        live = set(self._live)
        self._decode.keep_running(lambda r: r in live and (r in flying or _is_computed(r)))
        prefilling = self._prefill.prefilling
        if prefilling not in live or prefilling in self._decode.running or prefilling.kv is None:
            self._prefill.resume_prefilling(None)
        for request in flying.difference(self._decode.running):
            # A step that was not formed had its next chunk, or its last; one in flight still computes it.
            if request.scheduled_len < len(request.token_ids):
                self._prefill.resume_prefilling(request)
            elif request is not self._prefill.prefilling:
                self._decode.add_running(request)
        running = {*self._decode.running, *filter(None, [self._prefill.prefilling])}
        loading = self._offload.keep_loading(live)
        queued: list[Request] = []
        for request in self._live:
            if request.status is RequestStatus.PARKED or request in loading:
                continue
            if request in running:
                request.status = RequestStatus.RUNNING if request in self._decode.running else RequestStatus.PREFILLING
                continue
            request.requeue()
            queued.append(request)
        self._waiting.replace_requests(queued)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _recount(self, in_flight: Sequence[PlannedStep], now: float) -> None:
        """Derive locks, leases, rows, pages and fences from their holders. Raises InvariantError."""
        memory, cache = self._memory, self._memory.cache
        holders = [request for request in self._live if request.kv is not None]
        for lease in memory.leases.live():
            if lease.kv is not None and not is_sound(cache, lease.kv):
                memory.leases.lose(lease)
        leased = [lease.kv for lease in memory.leases.live() if lease.kv is not None]
        sequences: list[KVSequence] = [*(request.held_kv for request in holders), *leased]
        restore_tree(cache, sequences)
        claims = Counter(
            request.inheritance.lease.serial
            for request in self._live
            if request.inheritance is not None and request.inheritance.lease is not None
        )
        memory.leases.rebuild(claims, now)
        beams = [request.beam_kv for request in holders if request.beam_kv is not None]
        rows = [sequence.row for sequence in sequences]
        if len(set(rows)) != len(rows):
            raise InvariantError("two sequences share a row")
        memory.req_to_token.keep_only({*rows, *(row for kv in beams for row in (*kv.rows.tolist(), *kv.spare))})
        for request in holders:
            memory.req_to_token.report_again(request.held_kv.row, request.held_kv.length)
            if request.beam_kv is not None:
                for row in request.beam_kv.rows.tolist():
                    memory.req_to_token.report_again(row, request.beam_kv.length)
        for kv in leased:
            memory.req_to_token.report_again(kv.row, kv.length)
        memory.copies.keep_only(sequences)
        self._recount_host()
        fences = {step.fence for step in in_flight}
        memory.allocator.fences.keep_only(fences | self._offload.open_fences)
        if cache.states is not None:
            names = named_states(sequences, holders)
            names += [*(node.state for node in cache.states.nodes()), *cache.residency.named_states()]
            lost = cache.states.slots.rebuild(Counter(names), list(fences))
            cache.states.slots.release_quarantine()
            if lost:
                logger.warning("%d recurrent states had lost their owner and are free again", lost)
        self._recount_pages(sequences, [self._beams.pages(r) for r in holders if r.beam_kv is not None], list(fences))

    def _recount_host(self) -> None:
        """Recount the host tier. Where the count does not add up, or it is unknown whether a copy was made, drop its
        copies; no request fails for that. Raises InvariantError where a load was left half done: requests may have
        read from it."""
        tier, tree = self._memory.tier, self._memory.cache.tree
        if tier is None:
            return
        loading = {fence for node in tree.nodes() for fence in (node.loading, node.state_loading) if fence}
        if not loading <= tier.under_way.keys():
            raise InvariantError("a load from the host ended by half")
        tier.recount()
        try:
            check_host(tier, tree.nodes())
        except InvariantError:
            logger.exception("the host's copies are given up")
            tier.discard_copies()

    def _recount_pages(
        self, sequences: Sequence[KVSequence], beam_pages: Sequence[np.ndarray], fences: list[int]
    ) -> None:
        memory, page, rows = self._memory, self._memory.page_size, self._memory.req_to_token.rows
        owned = [slots[::page] for slots in slots_of_tree(memory.cache)]
        owned += [rows[seq.row, seq.tree_len : seq.length : page] for seq in sequences]
        owned += [pages * page for pages in beam_pages]
        slots = np.concatenate([np.empty(0, dtype=np.int32), *owned]) // page * page
        if len(np.unique(slots)) != len(slots) or (len(slots) and slots.min() < page):
            raise InvariantError("a page has two owners")
        lost = memory.allocator.rebuild(slots.astype(np.int32), fences)
        memory.allocator.release_quarantine()
        if memory.cache.windows is not None:
            held = held_windows(memory.cache, sequences, beam_pages)
            leaving = memory.allocator.quarantined_pages()
            memory.cache.windows.pages.recount(memory.allocator.free_pages(), held, leaving)
        if lost:
            logger.warning("%d tokens of the pool had lost their owner and are free again", lost)


def _rewind(request: Request, steps: Sequence[tuple[PlannedStep, set[Request]]]) -> bool:
    """Count only the steps that were formed and have not ended for this request; returns whether there are any."""
    flying = [step for step, done in steps if request not in done]
    if request.beam_kv is not None:
        own = [step for step in flying if request in step.searches]
        request.rewind_beams(len(own))
        return bool(own)
    if request.kv is None:
        return False
    scheduled, placeholders, num_drafted, is_flying = request.committed_len, 0, 0, False
    for step in flying:
        batch = step.batch
        for row, other in enumerate(step.requests):
            if other is request:
                num_drafted = int(batch.draft_lens[row]) if batch.draft_lens is not None else 0
                scheduled, is_flying = int(batch.seq_lens[row]), True
                placeholders += int(batch.samples[row]) + num_drafted
                break
    request.rewind(scheduled, placeholders, num_drafted)
    return is_flying


def _has_state(request: Request) -> bool:
    """True if a request has the recurrent state that its next step starts from; then it names no later one."""
    if request.beam_kv is not None:
        request.beam_kv.targets = NO_STATES
        return request.beam_kv.has_states
    states = request.held_kv.states
    states.targets = []
    states.held = [state for state in states.held if state.length <= request.scheduled_len]
    return (states.newest.length if states.newest is not None else 0) == request.scheduled_len


def _is_computed(request: Request) -> bool:
    """True if a running request that is in no step lacks one token only, or the next of its beams."""
    if request.is_search:
        return request.beam_kv is not None
    return request.scheduled_len >= len(request.token_ids) - 1


def _try(forget: Callable[[], None]) -> None:
    """Call ``forget``; log an exception, which leaves only a stale table entry: the request ends all the same."""
    try:
        forget()
    except Exception:
        logger.exception("a failed request could not be taken out of a table")
