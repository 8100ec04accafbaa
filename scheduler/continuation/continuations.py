"""Continuation: how the KV and the ids of one request pass to the next (docs/design/continuation.md).

    parent has ended   ──▶ the child inherits its recorded ids, and claims the lease on their KV if there is one
    parent runs        ──▶ "finish": the child is parked and inherits in the step in which the parent ends
                           "now": it inherits what the parent has by now; a copy of the parent's KV is leased for it

Admission turns the claim into the child's own lock (KVMemory.open_request). `Continuations` owns the records of
finished requests and the parked children; leases belong to the LeaseTable, requests and queues to the Scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...radix.lease import Lease, LeaseTable, LeaseTerms
from ..config import SchedulerConfig
from ..memory.beam_memory import BeamMemory
from ..memory.kv_memory import KVMemory
from ..outcome import RequestRefused, Retained
from ..queues import LiveRequests
from ..request import ContinuationPath, Inheritance, Request, RequestStatus
from ..request_spec import ContinuationSpec
from ..token_buffer import TokenBuffer, unpack_ids
from .records import ParentRecords, ParkedChildren, SampleRecord
from .refusals import (
    failed_parent,
    fewer_results,
    parent_of_other_adapter,
    parked_parent,
    search_with_stop_strings,
    undecided_search,
    unknown_index,
)


@dataclass(slots=True)  # not frozen, which would make it slow to build; there is one for each child
class Handover:
    """The whole prompt of a request, and the source of its inherited tokens."""

    prompt: TokenBuffer
    path: ContinuationPath | None = None
    """How the first tokens are inherited; None for a prompt without a parent."""
    inherited_tokens: int = 0
    trimmed_tokens: int = 0
    lease: Lease | None = None
    """The lease on the parent's KV, if the parent has ended and was retained."""
    running_parent: Request | None = None
    """For a fork: the running parent; its KV is copied."""
    parent: tuple[str, int] | None = None
    """Rid and index of the parent; None if there is none or its name is forgotten."""
    diverged_at: int | None = None
    """See `CacheReport`."""


class Continuations:
    """Finds parents, hands over to children, and records ended requests: see the module docstring."""

    def __init__(self, config: SchedulerConfig, memory: KVMemory, beams: BeamMemory, leases: LeaseTable) -> None:
        self._memory = memory
        self._beams = beams
        self._leases = leases
        self._records = ParentRecords(config.max_finished_requests, config.max_finished_tokens)
        self._parked = ParkedChildren()

    @property
    def num_parked(self) -> int:
        """Children that wait for their parent to end."""
        return len(self._parked)

    def leased(self) -> dict[Lease, tuple[str, int]]:
        """The live leases on record, each with the rid and index of its sequence."""
        return self._records.leased()

    def leases_of(self, rid: str) -> dict[int, Lease]:
        """The live leases of a finished request, by index."""
        record = self._records.get_record(rid)
        samples = record.samples.items() if record is not None else ()
        return {index: sample.lease for index, sample in samples if sample.lease is not None and sample.is_leased}

    # -- children arrive ----------------------------------------------------------------------------------------------

    def find_prompt(
        self, requests: list[Request], live: LiveRequests, earlier: Sequence[tuple[str, int]] = ()
    ) -> Handover | None:
        """The prompt of new requests, with what they inherit. Parks them and returns None if their parent must end
        first. earlier: the last steps of their job. Raises RequestRefused."""
        first = requests[0]
        if (continuation := first.spec.continuation) is not None:
            return self._find_parent(requests, live.siblings_of(continuation.parent_rid))
        predecessor = first.spec.predecessor
        if predecessor is None and not earlier:
            return Handover(first.token_ids)
        named = [(predecessor.rid, predecessor.index)] if predecessor is not None else []
        found = {key: self._records.look_up(*key, first.namespace) for key in (*named, *earlier)}
        known = {key: sample.alternatives() for key, sample in found.items() if sample is not None}
        begun = [sample for samples in known.values() for sample in samples if sample.begins(first.own_ids)]
        if begun:
            sample = max(begun, key=lambda sample: sample.length)
            return _handover(sample, first.own_ids[sample.length :])
        leased = [sample for key in earlier for sample in known.get(key, ()) if sample.is_leased]
        handover = _branch(leased[0], first) if len(leased) == 1 else Handover(first.token_ids)
        left = [sample.leaves_at(first.own_ids) for samples in known.values() for sample in samples]
        places = [place for place in left if place is not None]
        if places and len(places) == len(left):  # otherwise the prompt is the beginning of a step
            handover.diverged_at = max(places)
        return handover

    def _find_parent(self, children: list[Request], siblings: Sequence[Request]) -> Handover | None:
        """siblings: the live sequences of the parent's rid, if any."""
        continuation = children[0].spec.continuation
        assert continuation is not None
        parent = _live_parent(siblings, continuation, children[0]) if siblings else None
        if parent is None:
            return self._find_record(children[0], continuation)
        if continuation.at == "now":
            if parent.status is RequestStatus.PARKED:
                raise parked_parent(parent.rid)
            if parent.is_search:
                raise undecided_search(continuation)
            prompt = TokenBuffer(parent.token_ids.view().copy())
            prompt.extend(children[0].own_ids)
            return Handover(prompt, "fork", len(parent.token_ids), running_parent=parent, parent=parent.key)
        if parent.is_search and parent.sampling.stop:
            raise search_with_stop_strings(continuation)
        for child in children:
            self._parked.park_child(child)
        return None

    def _find_record(self, child: Request, continuation: ContinuationSpec) -> Handover:
        sample = self._records.find_sample(continuation, child)
        if sample is not None:
            return _handover(sample.alternatives()[0], child.own_ids)
        assert continuation.fallback_ids is not None
        return Handover(TokenBuffer(unpack_ids(continuation.fallback_ids)), "fallback")

    def hand_over(self, children: list[Request], handover: Handover, now: float) -> None:
        """Give queued children everything else that their parent left; only the first can take its lease."""
        if handover.path is None:
            return
        for child in children:
            child.inheritance = Inheritance(handover.path, handover.inherited_tokens, handover.trimmed_tokens)
            child.inheritance.parent = handover.parent
        first = children[0].inheritance
        spec = children[0].spec.continuation
        assert first is not None
        parent, lease = handover.running_parent, handover.lease
        if lease is not None and self._leases.claim(lease, now):
            first.path, first.lease = "handoff", lease
            first.keep_parent = spec is not None and spec.keep_parent
        elif parent is not None and parent.kv is not None:  # else the parent itself waits; its KV is in the tree
            first.lease = self._memory.lease_copy(parent, LeaseTerms(now, now, children[0].spec.client))
            if first.lease is not None:
                self._leases.claim(first.lease, now)

    def give_claim_back(self, child: Request, now: float) -> None:
        """Give back the lease that a waiting child has claimed, if any, because the child is leaving."""
        if child.inheritance is not None and child.inheritance.lease is not None:
            self._leases.unclaim(child.inheritance.lease, now)
            child.inheritance.lease = None

    def unpark_child(self, child: Request) -> None:
        """Remove a child if it is parked."""
        if child.spec.continuation is not None:
            self._parked.remove_child(child)

    def waiting_for(self, rid: str, index: int) -> list[Request]:
        """Children that are parked until this sequence ends."""
        return self._parked.waiting_for(rid, index)

    # -- parents end --------------------------------------------------------------------------------------------------

    def record_end(
        self, request: Request, kept_tokens: int | None, now: float, fence: int | None
    ) -> dict[int, SampleRecord]:
        """Record a request that ended well. Returns what children inherit, by sample: the ids without the matched stop,
        and a lease on their KV if retain_ttl or a parked child asks for one.

        kept_tokens: output tokens that are inherited, None for all; each result of a search knows its own number.
        fence: that of the step in flight which may still write for the request.
        """
        if request.is_search:
            return self._record_results(request, now)
        length = len(request.token_ids) if kept_tokens is None else request.prompt_len + kept_tokens
        trimmed = len(request.token_ids) - length
        is_kept = request.index < request.num_retained
        lease = None
        awaited = bool(self._parked.waiting_for(request.rid, request.index))
        if is_kept or awaited:
            terms = request.lease_terms(now, awaited=awaited)
            lease, demoted = self._memory.retain(request, length, terms, fence)
            if is_kept:
                request.retained = _retained(lease, demoted)
        samples = {request.index: SampleRecord(request.key, request.token_ids.cut(length), trimmed, lease)}
        self._records.add_samples(request, samples)
        return samples

    def _record_results(self, search: Request, now: float) -> dict[int, SampleRecord]:
        group, num_retained = search.beams, search.num_retained
        assert group is not None
        results = group.results
        wanted = [i for i in range(len(results)) if i < num_retained or self._parked.waiting_for(search.rid, i)]
        awaited = any(self._parked.waiting_for(search.rid, i) for i in wanted)
        terms = search.lease_terms(now, awaited=awaited)
        granted = self._beams.retain_results(search, [results[i] for i in wanted], terms)
        leases: list[Lease | None] = [None] * len(results)
        for index, lease in zip(wanted, granted):
            leases[index] = lease
        if num_retained:
            demoted = self._memory.demote(search.held_kv) if None in leases[:num_retained] else 0
            group.retained = [_retained(lease, demoted) if i < num_retained else None for i, lease in enumerate(leases)]
        samples: dict[int, SampleRecord] = {}
        for index, (hypothesis, lease) in enumerate(zip(results, leases)):
            result = hypothesis.ids[: hypothesis.kept_tokens]
            trimmed = len(hypothesis.ids) - hypothesis.kept_tokens
            samples[index] = SampleRecord((search.rid, index), search.token_ids, trimmed, lease, result)
        self._records.add_samples(search, samples)
        return samples

    def record_failure(self, request: Request) -> None:
        """Record that a request was aborted or failed."""
        reason = request.finish.message if request.finish is not None else None
        self._records.record_failure(request, reason or "aborted", self._leases)

    def discard_request(self, request: Request) -> None:
        """Unpark a failed request and record its failure, so that it cannot be continued."""
        self.unpark_child(request)
        self.record_failure(request)

    def take_children(
        self, parent: Request, samples: dict[int, SampleRecord]
    ) -> list[tuple[list[Request], Handover | RequestRefused]]:
        """Take the parked children of an ended parent, by rid, each group with what it inherits or why it cannot."""
        taken: list[tuple[list[Request], Handover | RequestRefused]] = []
        for index in range(parent.sampling.n) if parent.is_search else (parent.index,):
            by_rid: dict[str, list[Request]] = {}
            for child in self._parked.take_children(parent.rid, index):
                by_rid.setdefault(child.rid, []).append(child)
            for children in by_rid.values():
                if index in samples:
                    taken.append((children, _handover(samples[index], children[0].own_ids)))
                else:
                    taken.append((children, _no_sample(parent, children[0], len(samples))))
        return taken

    def sample_of(self, rid: str, index: int, namespace: str) -> SampleRecord | None:
        """A sequence that ended well and is still on record."""
        return self._records.look_up(rid, index, namespace)

    def record_prepared(self, rid: str, index: int, namespace: str, ids: np.ndarray) -> None:
        """Record that the lease of a finished sequence now keeps the KV of ``ids``, int32 [n], the beginning of the
        prompt that will follow it."""
        if (sample := self._records.look_up(rid, index, namespace)) is not None:
            self._records.set_prepared(sample, TokenBuffer(ids))

    # -- records ------------------------------------------------------------------------------------------------------

    def is_on_record(self, rid: str) -> bool:
        """True if ``rid`` has ended and can still be named as a parent."""
        return self._records.get_record(rid) is not None

    def forget_record(self, rid: str) -> None:
        """Take a finished request off the record, as if it had never existed."""
        self._records.discard_record(rid, self._leases)

    def lease_sample(self, rid: str, index: int, terms: LeaseTerms) -> Lease | None:
        """Lease what the cache still has of a sequence that ended without a lease. None if it is not on record, or the
        lease is refused."""
        record = self._records.get_record(rid)
        sample = record.samples.get(index) if record is not None and record.failure is None else None
        if record is None or sample is None or sample.lease is not None or len(sample.result):
            return None
        sample.lease = self._memory.lease_cached(record.namespace, sample.ids.view(), terms)
        return sample.lease

    def release_leases(self, rid: str) -> bool:
        """Give up the leases of a finished request; its ids stay on record. False if it has none."""
        record = self._records.get_record(rid)
        if record is None or not record.is_leased:
            return False
        for sample in record.samples.values():
            if sample.lease is not None:
                self._leases.release(sample.lease)
        return True


def _live_parent(siblings: Sequence[Request], continuation: ContinuationSpec, child: Request) -> Request | None:
    """The parent if it has not ended. One of another namespace counts as none. Raises RequestRefused for an index that
    it does not have, and for one of another adapter, unless the child brings its own prompt."""
    if siblings[0].namespace != child.namespace:
        if siblings[0].spec.namespace == child.spec.namespace and continuation.fallback_ids is None:
            raise parent_of_other_adapter(siblings[0].rid)
        return None
    if continuation.index >= siblings[0].sampling.n:
        raise unknown_index(continuation)
    if siblings[0].is_search:
        return siblings[0]
    return next((r for r in siblings if r.index == continuation.index), None)


def _handover(sample: SampleRecord, suffix: np.ndarray) -> Handover:
    """suffix: int32 [n]"""
    prompt = sample.ids.share()
    if len(sample.result):
        prompt.extend(sample.result)
    prompt.extend(suffix)
    return Handover(prompt, "match", sample.length, sample.trimmed_tokens, sample.lease, parent=sample.name)


def _branch(sample: SampleRecord, request: Request) -> Handover:
    """Inherit the tokens that a prompt shares with its job's only lease, although it does not continue that sequence.

    This holds if they are most of the lease, as where a template drops the model's reasoning. Otherwise the job runs a
    side task and may come back for the lease, so nothing is inherited.
    """
    shared = sample.shared_with(request.own_ids)
    if 2 * shared < sample.length:
        return Handover(request.token_ids)
    return Handover(request.token_ids, "match", shared, sample.trimmed_tokens, sample.lease, parent=sample.name)


def _no_sample(parent: Request, child: Request, found: int) -> RequestRefused:
    assert child.spec.continuation is not None
    if found:
        return fewer_results(child.spec.continuation, found)
    return failed_parent(parent.rid, parent.finish)


def _retained(lease: Lease | None, demoted: int) -> Retained:
    """demoted: tokens that a tier keeps where there is no lease."""
    if lease is None:
        return Retained(
            tokens=demoted,
            tier="host" if demoted else None,
            refused="the leases' budget, or this client's share of it, is used up (--max-leased-ratio, "
            "--max-leased-requests, --max-client-leased-ratio, --max-leases-per-client)",
        )
    return Retained(tokens=lease.tokens, deadline=lease.deadline)
