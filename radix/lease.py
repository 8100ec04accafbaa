"""Leases: locks with a deadline, over a whole sequence, so that a later request can continue where another ended.

    grant ──▶ granted ──claim──▶ claimed ──hand_off──▶ handed off        the child has row, lock and partial page
                 │  ▲               │  │
                 │  └───unclaim─────┘  └──break──▶ broken                 memory was needed more
                 ├──deadline──▶ expired
                 ├──break────▶ broken
                 └──release──▶ released

A lease owns its `KVSequence` from grant to end; every arrow moves that one object or closes it, so the lock on the
node never passes through 0 on the way to a child. A claim stops the clock; giving it back restores the time that was
left. Time is an argument. Any lease can be broken at any moment: its whole pages stay in the tree, evictable.

The table does not choose which lease breaks first: a function gives the value of each (`LeaseValue`). Where a new
lease would exceed a budget, leases that are worth less give way to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from .cache import RadixCache
from .kv_sequence import KVSequence, SequenceEnd
from .lazy_heap import LazyHeap
from .lease_budget import LeaseBudget
from .node import TreeNode


class LeaseState(Enum):
    GRANTED = "granted"
    CLAIMED = "claimed"
    HANDED_OFF = "handed off"
    EXPIRED = "expired"
    BROKEN = "broken"
    RELEASED = "released"


_ENDS = {LeaseState.EXPIRED: SequenceEnd.EXPIRED, LeaseState.RELEASED: SequenceEnd.RELEASED}


@dataclass(slots=True, frozen=True)
class LeaseTerms:
    """The terms of a new lease: its deadline, the time now, and its client ("" if unknown). owner: the object it is
    kept for; only the policy that values leases reads it."""

    deadline: float
    now: float
    client: str = ""
    owner: object = None


@dataclass(slots=True, eq=False)
class Lease:
    """One leased sequence. ``deadline`` in the caller's clock; while claimed, ``remaining`` holds the time left."""

    kv: KVSequence | None
    """None once the lease has ended."""
    deadline: float
    serial: int
    idle_since: float = 0.0
    """When it was granted, or last unclaimed."""
    client: str = ""
    owner: object = None
    own_tokens: int = 0
    """Pool tokens that count for it, in whole pages: those that no other lease held when it was granted, and those
    that other leases left to it when they ended."""
    state: LeaseState = LeaseState.GRANTED
    remaining: float = 0.0
    claims: int = 0
    """Children that wait to take it over or to copy it."""
    written_by: int | None = None
    """The fence of a step that was in flight when the lease was granted and writes a slot of its partial page."""
    value: tuple[float, ...] | None = None
    """Its latest value; None if it must be valued before the next lease breaks."""

    @property
    def tokens(self) -> int:
        """Tokens it keeps KV of."""
        return self.kv.length if self.kv is not None else 0

    @property
    def is_live(self) -> bool:
        return self.kv is not None


LeaseValue = Callable[[Lease, float], tuple[float, ...]]
"""``value(lease, now)``: the value of a live lease. The lowest breaks first; among equals, the one granted first.

It is called only when a lease has to break: for leases that are new or have changed since the last time (claimed,
unclaimed, extended), and for the one that comes first. So a value may rise as time passes: the lease then moves to its
new place. A value must not fall by itself, or the lease breaks later than it should; code that knows of a fall
calls `LeaseTable.extend_lease`, with the same deadline if need be.
"""


@dataclass(slots=True)
class LeaseCounts:
    """Since start."""

    granted: int = 0
    handed_off: int = 0
    expired: int = 0
    broken: int = 0
    released: int = 0


class LeaseTable:
    """Owns all live leases, within a budget.

    Expiry and breaking cost O(log leases), all else O(1); only a client at its share of a used-up budget costs a look
    at each of its leases.
    """

    def __init__(
        self,
        cache: RadixCache,
        budget: LeaseBudget,
        *,
        value: LeaseValue,
        has_share: Callable[[Lease], bool] = lambda lease: True,
    ) -> None:
        """has_share: whether a lease may use its client's share against those of other clients. Leases without one are
        valued least: they never break others for their client's share, and break first for any that is worth more."""
        self._cache = cache
        self.budget = budget
        self._value = value
        self._has_share = has_share
        self._leases: dict[int, Lease] = {}
        """By serial, as in the heaps."""
        self._next_serial = 0
        self.deadlines = LazyHeap(self._deadline_of)
        """Deadlines of granted leases."""
        self.values = LazyHeap(self._value_of)
        """Values of live leases that have been valued."""
        self.unvalued: dict[int, Lease] = {}
        """All other live leases; their ``value`` is None."""
        self.counts = LeaseCounts()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def leased_tokens(self) -> int:
        """Pool tokens that some live lease holds, in whole pages."""
        return self.budget.tokens

    @property
    def num_ended(self) -> int:
        """Leases that have ended since start, in whatever way."""
        return self.counts.granted - len(self._leases)

    def live(self) -> list[Lease]:
        return list(self._leases.values())

    def grant(self, kv: KVSequence, terms: LeaseTerms, written_by: int | None = None) -> Lease | None:
        """Take ``kv`` over; None, and the caller keeps it, if that would exceed a budget and no lease gives way."""
        self.budget.hold(kv)
        if not self.make_room(terms):
            self._unhold(kv, self.budget.uncounted_tokens, terms.client)
            return None
        lease = self._lease(kv, terms)
        lease.own_tokens, lease.written_by = self.budget.uncounted_tokens, written_by
        self._next_serial += 1
        self._leases[lease.serial] = self.unvalued[lease.serial] = lease
        self.budget.add_lease(lease.client, lease.serial, lease.own_tokens)
        self.deadlines.push_entry(lease.deadline, lease.serial)
        self.counts.granted += 1
        return lease

    def make_room(self, terms: LeaseTerms) -> bool:
        """Break leases until one on these terms is within budget: those without a share, those of a client above its
        share, and then those that are worth less. Of leases with a share, a client that would be above its own has only
        its own to give. What it brings is held already, or nothing. False if that is not enough."""
        budget, new = self.budget, self._lease(None, terms)
        if budget.never_holds(terms.client, budget.uncounted_tokens):
            return False
        worth = None
        while (limit := budget.exceeded_by(terms.client, budget.uncounted_tokens)) is not None:
            victim = self.least_valuable(terms.now)
            if victim is not None and self._has_share(victim):
                above = self._above_share(terms.now) if limit == "all" and self._has_share(new) else None
                if above is not None:
                    self.break_lease(above)
                    continue
                victim = self._least_of(terms.client, terms.now) if limit == "client" else victim
            worth = self._value(new, terms.now) if worth is None else worth
            if victim is None or self._value(victim, terms.now) >= worth:
                return False
            self.break_lease(victim)
        return True

    def _above_share(self, now: float) -> Lease | None:
        """The least valuable lease of the first client above its share; leases that a child waits for do not count, so
        None if there are no others."""
        least = (self._least_of(client, now) for client in self.budget.clients_above_share())
        return next((lease for lease in least if lease is not None and lease.state is LeaseState.GRANTED), None)

    def _lease(self, kv: KVSequence | None, terms: LeaseTerms) -> Lease:
        return Lease(kv, terms.deadline, self._next_serial, terms.now, terms.client, terms.owner)

    def _least_of(self, client: str, now: float) -> Lease | None:
        leases = [self._leases[serial] for serial in self.budget.serials_of(client)]
        return min(leases, key=lambda lease: self._value(lease, now), default=None)

    def claim(self, lease: Lease, now: float) -> bool:
        """Claim a lease for a child, which stops its clock. False if it has ended or is overdue. Several children may
        claim one lease; the first to take it over gets it."""
        if lease.state is LeaseState.GRANTED and lease.deadline >= now:
            lease.state = LeaseState.CLAIMED
            lease.remaining = lease.deadline - now
        elif lease.state is not LeaseState.CLAIMED:
            return False
        lease.claims += 1
        self._changed(lease)
        return True

    def unclaim(self, lease: Lease, now: float) -> None:
        """Give a claim back: a child was aborted, or has copied what it needed. After the last claim the clock resumes
        where it stopped. Ended leases stay ended."""
        if lease.state is LeaseState.CLAIMED:
            lease.claims -= 1
            if lease.claims == 0:
                lease.state = LeaseState.GRANTED
                lease.idle_since = now
                self._set_deadline(lease, now + lease.remaining)
            self._changed(lease)

    def extend_lease(self, lease: Lease, deadline: float) -> bool:
        """Move the deadline of a granted lease, in either direction."""
        if lease.state is not LeaseState.GRANTED:
            return False
        self._set_deadline(lease, deadline)
        self._changed(lease)
        return True

    def exchange(self, lease: Lease, kv: KVSequence) -> bool:
        """Have a granted lease keep ``kv`` in place of its sequence, on the same terms, and release that. False, and
        the caller keeps ``kv``, if the lease is claimed or has ended, or if a budget would be exceeded: no other lease
        gives way."""
        old, budget = lease.kv, self.budget
        if old is None or lease.state is not LeaseState.GRANTED:
            return False
        budget.remove_lease(lease.client, lease.serial, lease.own_tokens)
        self._unhold(old, lease.own_tokens, lease.client, lease)
        budget.hold(kv)
        added = budget.uncounted_tokens
        fits = not budget.never_holds(lease.client, added) and budget.exceeded_by(lease.client, added) is None
        if not fits:
            self._unhold(kv, added, lease.client, lease)
            budget.hold(old)
        lease.own_tokens = budget.uncounted_tokens
        budget.add_lease(lease.client, lease.serial, lease.own_tokens)
        if fits:
            fence, lease.kv, lease.written_by = self._open_fence_of(lease), kv, None
            self._cache.release(old, fence=fence, how=SequenceEnd.RELEASED)
            self._changed(lease)
        return fits

    def hand_off(self, lease: Lease) -> KVSequence:
        """End the lease and give its sequence, lock and all, to the caller. Costs the same for any length."""
        kv = self._end(lease, LeaseState.HANDED_OFF)
        self.counts.handed_off += 1
        return kv

    def release(self, lease: Lease) -> None:
        """End a lease that its owner no longer needs. Ended leases stay as they are."""
        if lease.is_live:
            self._close(lease, LeaseState.RELEASED)
            self.counts.released += 1

    def orphan(self, lease: Lease) -> None:
        """Release a lease that no request can name any more; a claimed one only once its children have given it
        back."""
        if lease.state is LeaseState.CLAIMED:
            lease.remaining = 0.0
        else:
            self.release(lease)

    def expire(self, now: float) -> int:
        """End every granted lease that has reached its deadline; returns how many."""
        if not self.deadlines.may_have(now):
            return 0
        expired = 0
        while (first := self.deadlines.first()) is not None and first[0] <= now:
            self._close(self._leases[first[1]], LeaseState.EXPIRED)
            expired += 1
        self.counts.expired += expired
        return expired

    def next_deadline(self) -> float | None:
        """The first time at which `expire` has something to do; None if no lease has a deadline."""
        first = self.deadlines.first()
        return first[0] if first is not None else None

    def break_one(self, now: float, spare: Lease | None = None) -> bool:
        """End the least valuable lease to free memory. False if there is none but ``spare``."""
        lease = self.least_valuable(now, spare)
        if lease is None:
            return False
        self.break_lease(lease)
        return True

    def break_lease(self, lease: Lease) -> None:
        """End a live lease to free memory."""
        self._close(lease, LeaseState.BROKEN)
        self.counts.broken += 1

    def least_valuable(self, now: float, spare: Lease | None = None) -> Lease | None:
        """The live lease that `break_one` would break; None if there is none but ``spare``."""
        for lease in self.unvalued.values():
            self._set_value(lease, self._value(lease, now))
        self.unvalued.clear()
        victim, spared = None, False
        while victim is None and (first := self.values.pop()) is not None:
            old_value, serial = first
            lease = self._leases[serial]
            if lease is spare:
                spared = True
            elif (value := self._value(lease, now)) > old_value:
                self._set_value(lease, value)
            else:
                victim = lease
        for lease in (spare if spared else None, victim):
            if lease is not None and lease.value is not None:
                self._set_value(lease, lease.value)  # back into its place
        return victim

    def break_all(self) -> None:
        """End every lease."""
        for lease in self.live():
            self._close(lease, LeaseState.BROKEN)
            self.counts.broken += 1

    def discard_leases(self) -> None:
        """Break every lease, but give nothing back; used together with `RadixCache.discard_all`."""
        for lease in self._leases.values():
            lease.kv, lease.state = None, LeaseState.BROKEN
        self.counts.broken += len(self._leases)
        self._leases.clear()
        self.unvalued.clear()
        self.budget.clear()

    def rebuild(self, claims: Mapping[int, int], now: float) -> None:
        """Count anew the tokens and the claims of the live leases, and drop those that hold nothing. claims: by serial.

        Used after an exception, when a lease may have been granted or ended only in part. All nodes have a
        ``lease_ref`` of 0.
        """
        self.budget.clear()
        self.deadlines, self.values = LazyHeap(self._deadline_of), LazyHeap(self._value_of)
        kept = [lease for lease in self._leases.values() if lease.kv is not None]
        self._leases = {lease.serial: lease for lease in kept}
        self.unvalued = dict(self._leases)
        for lease in kept:
            assert lease.kv is not None
            self.budget.hold(lease.kv)
            lease.own_tokens = self.budget.uncounted_tokens
            self.budget.add_lease(lease.client, lease.serial, lease.own_tokens)
            lease.value, lease.claims = None, claims.get(lease.serial, 0)
            if not lease.claims and lease.state is LeaseState.CLAIMED:
                lease.state, lease.idle_since, lease.deadline = LeaseState.GRANTED, now, now + lease.remaining
            elif lease.claims and lease.state is LeaseState.GRANTED:
                lease.state, lease.remaining = LeaseState.CLAIMED, max(0.0, lease.deadline - now)
            if lease.state is LeaseState.GRANTED:
                self.deadlines.push_entry(lease.deadline, lease.serial)

    def lose(self, lease: Lease) -> None:
        """End a live lease without giving back what it holds, which is not what it says."""
        lease.kv, lease.state = None, LeaseState.BROKEN
        self._leases.pop(lease.serial, None)
        self.counts.broken += 1

    def _close(self, lease: Lease, state: LeaseState) -> None:
        """End a lease and give back all it holds. Unless its owner released it, its KV is demoted."""
        if lease.kv is not None and lease.kv.node is not None and state is not LeaseState.RELEASED:
            self._cache.residency.path_demoted(lease.kv.node)
        fence = self._open_fence_of(lease)
        self._cache.release(self._end(lease, state), fence=fence, how=_ENDS.get(state, SequenceEnd.FINISHED))

    def _open_fence_of(self, lease: Lease) -> int | None:
        """``written_by``, if that step is still in flight."""
        fence = lease.written_by
        return fence if fence is not None and self._cache.allocator.fences.is_open(fence) else None

    def _end(self, lease: Lease, state: LeaseState) -> KVSequence:
        kv = lease.kv
        if kv is None:
            raise ValueError(f"the lease is {lease.state.value} already")
        lease.kv, lease.state = None, state
        del self._leases[lease.serial]
        self.unvalued.pop(lease.serial, None)
        self.budget.remove_lease(lease.client, lease.serial, lease.own_tokens)
        self._unhold(kv, lease.own_tokens, lease.client)
        return kv

    def _unhold(self, kv: KVSequence, own: int, client: str, lease: Lease | None = None) -> None:
        """Hold a sequence no more. Of the ``own`` tokens that counted for it, those that other leases still hold count
        for the oldest of them from now on, one of the same client if there is one. lease: the sequence's, if it is
        still in the table."""
        freed, node = self.budget.unhold(kv)
        if freed == own:
            return
        heirs = [each for each in self._leases.values() if each is not lease and _passes(each, node)]
        if heirs:  # otherwise the sequence of a lease that is being granted holds them
            heir = min(heirs, key=lambda each: (each.client != client, each.serial))
            heir.own_tokens += own - freed
            self.budget.add_tokens(heir.client, own - freed)

    # -- the heaps: a change pushes a new entry, and the old one is dead ----------------------------------------------

    def _set_deadline(self, lease: Lease, deadline: float) -> None:
        lease.deadline = deadline
        self.deadlines.push_entry(deadline, lease.serial)

    def _set_value(self, lease: Lease, value: tuple[float, ...]) -> None:
        lease.value = value
        self.values.push_entry(value, lease.serial)

    def _changed(self, lease: Lease) -> None:
        """Have a lease valued again: it may be worth more or less now."""
        if lease.value is not None:
            lease.value = None
            self.unvalued[lease.serial] = lease

    def _deadline_of(self, serial: int) -> float | None:
        lease = self._leases.get(serial)
        return lease.deadline if lease is not None and lease.state is LeaseState.GRANTED else None

    def _value_of(self, serial: int) -> tuple[float, ...] | None:
        lease = self._leases.get(serial)
        return lease.value if lease is not None else None


def _passes(lease: Lease, node: TreeNode) -> bool:
    """Does a lease hold this node?"""
    below = lease.kv.node if lease.kv is not None else None
    while below is not None and below.prefix_len > node.prefix_len:
        below = below.parent
    return below is node
