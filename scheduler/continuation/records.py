"""Records of finished requests and their children: which parents can be continued, and what a child inherits.

    parent runs      ──▶ the child is parked under the parent's key until the parent ends
    parent finished  ──▶ its record has the ids a child inherits, and the lease on their KV while that lives
    parent failed    ──▶ its record is a tombstone: 409
    parent forgotten ──▶ only its name is remembered: the child's own full prompt, else 410
    anything else    ──▶ 404, also where the namespace differs: requests of other namespaces stay hidden

Owns records and parked children; leases belong to the LeaseTable, requests to the Scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...radix.lease import Lease, LeaseTable
from ..client_shares import ClientShares
from ..jobs.kept_turn import job_id_of
from ..request import Request
from ..request_spec import ContinuationSpec
from ..token_buffer import TokenBuffer, TokenMemory
from .refusals import failed_parent, forgotten_parent, parent_of_other_adapter, unknown_index, unknown_parent

Name = tuple[str, int]
"""rid and index of a sequence."""


@dataclass(slots=True)
class SampleRecord:
    """One finished sequence. A child inherits ``ids`` and after them ``result``, the matched stop left out."""

    name: tuple[str, int]
    """Rid and index of the sequence."""
    ids: TokenBuffer
    """Prompt and output; of a beam search the prompt, which its results share."""
    trimmed_tokens: int
    lease: Lease | None = None
    result: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """int32 [n]: the generated tokens of one result of a beam search."""
    prepared: TokenBuffer | None = None
    """The tokens of its job's next prompt that were computed in idle time; the lease is then on their KV, and not on
    that of ``ids``."""

    def alternatives(self) -> list[SampleRecord]:
        """The sequences that a prompt may continue, each with the lease on its KV: this one, and the prepared one."""
        if self.prepared is None:
            return [self]
        own = SampleRecord(self.name, self.ids, self.trimmed_tokens, None, self.result)
        return [own, SampleRecord(self.name, self.prepared, 0, self.lease)]

    @property
    def length(self) -> int:
        """Tokens that a child inherits."""
        return len(self.ids) + len(self.result)

    @property
    def is_leased(self) -> bool:
        return self.lease is not None and self.lease.is_live

    def shared_with(self, prompt: np.ndarray) -> int:
        """Number of leading tokens shared with ``prompt``, int32 [n]; those of a search's result do not count."""
        ids = self.ids.view(0, min(len(self.ids), len(prompt)))
        differing = np.flatnonzero(ids != prompt[: len(ids)])
        return int(differing[0]) if len(differing) else len(ids)

    def leaves_at(self, prompt: np.ndarray) -> int | None:
        """Where ``prompt``, int32 [n], leaves these tokens; None if one of the two begins with the other."""
        shared = self.shared_with(prompt)
        if shared == len(self.ids) and len(self.result):
            result, rest = self.result, prompt[shared:]
            differing = np.flatnonzero(result[: len(rest)] != rest[: len(result)])
            shared += int(differing[0]) if len(differing) else min(len(result), len(rest))
        return shared if shared < min(self.length, len(prompt)) else None

    def begins(self, prompt: np.ndarray) -> bool:
        """True if ``prompt``, int32 [n], begins with these tokens."""
        middle = len(self.ids)
        return (
            len(prompt) >= self.length
            and np.array_equal(prompt[:middle], self.ids.view())
            and np.array_equal(prompt[middle : self.length], self.result)
        )


@dataclass(slots=True)
class ParentRecord:
    """One finished rid; ``failure`` says why it cannot be continued, None if it can."""

    namespace: str
    """Namespace of its KV; see `Request.namespace`."""
    asked_namespace: str
    """Namespace in its spec, which is the same for requests of different adapters."""
    samples: dict[int, SampleRecord] = field(default_factory=dict)
    failure: str | None = None

    @property
    def is_leased(self) -> bool:
        return any(sample.is_leased for sample in self.samples.values())


class HeldTokens:
    """Counts the token ids that samples keep in memory: memory that several share counts once, with all its room."""

    def __init__(self) -> None:
        self.total = 0
        self._holders: dict[TokenMemory, int] = {}
        """Samples that hold each memory."""

    def add_samples(self, samples: Iterable[SampleRecord]) -> None:
        for sample in samples:
            self.total += len(sample.result)
            for memory in _memories(sample):
                holders = self._holders.get(memory, 0)
                self._holders[memory] = holders + 1
                self.total += 0 if holders else len(memory)

    def remove_samples(self, samples: Iterable[SampleRecord]) -> None:
        for sample in samples:
            self.total -= len(sample.result)
            for memory in _memories(sample):
                holders = self._holders.pop(memory) - 1
                if holders:
                    self._holders[memory] = holders
                self.total -= 0 if holders else len(memory)


def _memories(sample: SampleRecord) -> list[TokenMemory]:
    return [sample.ids.memory] if sample.prepared is None else [sample.ids.memory, sample.prepared.memory]


class ParentRecords:
    """Finished requests. When there are too many, the oldest of the client that holds most are forgotten first; those
    with a live lease never are. A turn that appends to its parent's memory adds only what that had no room for."""

    FORGOTTEN_PER_RECORD = 16
    """This many names of forgotten requests are remembered for each record that may be kept."""

    def __init__(self, max_records: int, max_tokens: int) -> None:
        self._max_records = max_records
        self._max_tokens = max_tokens
        self._records: dict[str, ParentRecord] = {}
        self._shares: ClientShares[str] = ClientShares()
        """Rids of the records; their sizes are the tokens that children inherit."""
        self._newest = ""
        """The rid that was recorded last; it is not forgotten for itself."""
        self._forgotten: OrderedDict[str, str] = OrderedDict()
        self.held = HeldTokens()

    def __len__(self) -> int:
        return len(self._records)

    def add_samples(self, request: Request, samples: dict[int, SampleRecord]) -> None:
        """Record sequences that ended well, by their index among the samples, or the ranked beams, of their request."""
        record = self._record(request, sum(sample.length for sample in samples.values()))
        record.samples |= samples
        self.held.add_samples(samples.values())
        self._forget_others()

    def record_failure(self, request: Request, reason: str, leases: LeaseTable) -> None:
        """Record that a sequence was aborted or failed. Its rid fails with it: no sibling can be continued either."""
        record = self._record(request)
        record.failure = reason
        _orphan_leases(record, leases)
        self._forget_others()

    def set_prepared(self, sample: SampleRecord, ids: TokenBuffer) -> None:
        """Note that the lease of a sample is now on the KV of these tokens."""
        self.held.remove_samples([sample])
        sample.prepared = ids
        self.held.add_samples([sample])
        self._newest = sample.name[0]
        self._forget_others()

    def get_record(self, rid: str) -> ParentRecord | None:
        return self._records.get(rid)

    def discard_record(self, rid: str, leases: LeaseTable) -> None:
        """Drop a record and its leases, because a new request takes over the name."""
        self._forgotten.pop(rid, None)
        self._shares.remove_key(rid)
        record = self._records.pop(rid, None)
        if record is None:
            return
        self.held.remove_samples(record.samples.values())
        _orphan_leases(record, leases)

    def find_sample(self, spec: ContinuationSpec, child: Request) -> SampleRecord | None:
        """The sample that ``spec``, of ``child``, continues; None if it is forgotten, unknown or of another adapter,
        and the spec brings its own prompt.

        Raises RequestRefused: 400, 404, 409 or 410.
        """
        namespace, rid = child.namespace, spec.parent_rid
        record = self._records.get(rid)
        forgotten = self._forgotten.get(rid) == namespace
        if forgotten and (record is None or spec.index not in record.samples):
            if spec.fallback_ids is not None:
                return None
            raise forgotten_parent(rid)
        if record is None or record.namespace != namespace:
            if spec.fallback_ids is not None:
                return None
            if record is not None and record.asked_namespace == child.spec.namespace:
                raise parent_of_other_adapter(rid)
            raise unknown_parent(rid)
        if record.failure is not None:
            raise failed_parent(rid, record.failure)
        if spec.index not in record.samples:
            raise unknown_index(spec)
        return record.samples[spec.index]

    def leased(self) -> dict[Lease, tuple[str, int]]:
        """The live leases on record, each with the rid and index of its sequence."""
        return {
            sample.lease: (rid, index)
            for rid, record in self._records.items()
            for index, sample in record.samples.items()
            if sample.lease is not None and sample.lease.is_live
        }

    def look_up(self, rid: str, index: int, namespace: str) -> SampleRecord | None:
        """A sample that ended well and is still known."""
        record = self._records.get(rid)
        if record is None or record.namespace != namespace or record.failure is not None:
            return None
        return record.samples.get(index)

    def _record(self, request: Request, added_tokens: int = 0) -> ParentRecord:
        """The request's record, the newest now. added_tokens: how many more children may inherit from it."""
        rid = request.rid
        known = sum(sample.length for sample in self._records[rid].samples.values()) if rid in self._records else 0
        self._shares.put_key(request.spec.client, rid, known + added_tokens)
        self._newest = rid
        return self._records.setdefault(rid, ParentRecord(request.namespace, request.spec.namespace))

    def _forget_others(self) -> None:
        """Forget records until the limits hold, except the newest record."""
        while (too_many := len(self._records) > self._max_records) or self.held.total > self._max_tokens:
            by_size = not too_many
            old = next(filter(self._is_forgettable, self._shares.in_order_of_forgetting(by_size=by_size)), None)
            if old is None:
                return
            self._forget(old)

    def _is_forgettable(self, rid: str) -> bool:
        record = self._records.get(rid)
        return rid != self._newest and (record is None or not record.is_leased)

    def _forget(self, rid: str) -> None:
        self._shares.remove_key(rid)
        record = self._records.pop(rid, None)
        if record is None:  # an exception kept it from being recorded
            return
        self.held.remove_samples(record.samples.values())
        self._forgotten[rid] = record.namespace
        if len(self._forgotten) > self.FORGOTTEN_PER_RECORD * self._max_records:
            self._forgotten.popitem(last=False)


class ParkedChildren:
    """Children of parents that still run, by the parent's (rid, index), in order of arrival."""

    def __init__(self) -> None:
        self._by_parent: dict[tuple[str, int], dict[Request, None]] = {}
        """The inner dict is an ordered set: a child can leave without a search for it."""
        self._num_children = 0

    def __len__(self) -> int:
        return self._num_children

    def park_child(self, child: Request) -> None:
        self._by_parent.setdefault(_parent_key(child), {})[child] = None
        self._num_children += 1

    def remove_child(self, child: Request) -> None:
        """Remove a child. One that `take_children` returned is gone already."""
        key = _parent_key(child)
        children = self._by_parent.get(key, {})
        if child in children:
            del children[child]
            self._num_children -= 1
        if not children:
            self._by_parent.pop(key, None)

    def waiting_for(self, rid: str, index: int) -> list[Request]:
        return list(self._by_parent.get((rid, index), ()))

    def take_children(self, rid: str, index: int) -> list[Request]:
        """Take the children of a parent that has ended; they are no longer parked."""
        children = list(self._by_parent.pop((rid, index), ()))
        self._num_children -= len(children)
        return children


def _parent_key(child: Request) -> tuple[str, int]:
    spec = child.spec.continuation
    assert spec is not None
    return spec.parent_rid, spec.index


def _orphan_leases(record: ParentRecord, leases: LeaseTable) -> None:
    for sample in record.samples.values():
        if sample.lease is not None:
            leases.orphan(sample.lease)


def describe_leases(
    leases: LeaseTable, names: Mapping[Lease, Name], now: float, after: int, limit: int, client: str | None = None
) -> dict[str, Any]:
    """A page of at most ``limit`` live leases, in the order in which they were granted, with serials greater than
    ``after``. ``next``: the value of ``after`` for the next page; None on the last. names: `Continuations.leased`.
    client: describe only leases that count in this client's budget."""
    live = [lease for lease in leases.live() if client is None or lease.client == client]
    later = [lease for lease in live if lease.serial > after]
    return {
        "leases": [_describe_lease(lease, names.get(lease), now) for lease in later[:limit]],
        "next": later[limit - 1].serial if len(later) > limit else None,
        "live": len(live),
        "leased_tokens": leases.leased_tokens if client is None else sum(lease.own_tokens for lease in live),
    }


def _describe_lease(lease: Lease, name: Name | None, now: float) -> dict[str, Any]:
    """name: rid and index of the sequence that it was granted for; None where its record is gone, and only waiting
    children still hold a claim."""
    rid, index = name if name is not None else (None, None)
    return {
        "serial": lease.serial,
        "rid": rid,
        "index": index,
        "job_id": job_id_of(lease),
        "user": lease.client,
        "tokens": lease.tokens,
        "own_tokens": lease.own_tokens,
        "idle_s": max(0.0, now - lease.idle_since),
        "expires_in_s": None if lease.claims else max(0.0, lease.deadline - now),
        "is_claimed": lease.claims > 0,
    }
