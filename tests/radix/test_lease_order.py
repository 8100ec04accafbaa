"""Which lease ends next: expiry and breaking against slow twins, values that change, heaps that stay small."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from baton.radix.invariants import InvariantError, check_leases
from baton.radix.lazy_heap import SPARE_ENTRIES, LazyHeap
from baton.radix.lease import Lease, LeaseState, LeaseTable, LeaseTerms, LeaseValue
from baton.radix.lease_budget import LeaseBudget
from tests.doubles.cache_rig import CacheRig
from tests.doubles.policy_scene import fcfs

lease_value = fcfs().lease_value


class LeaseRig:
    """A lease table, and leases of one token each."""

    def __init__(self, value: LeaseValue = lease_value, max_leases: int = 64) -> None:
        self.rig = CacheRig(num_tokens=1024, rows=max_leases)
        budget = LeaseBudget(1, max_tokens=1024, max_leases=max_leases)
        self.leases = LeaseTable(self.rig.cache, budget, value=value)

    def grant(self, deadline: float, now: float = 0.0) -> Lease:
        running = self.rig.start(np.array([len(self.leases)], dtype=np.int32))
        self.rig.running.clear()
        assert self.rig.compute(running)
        lease = self.leases.grant(running.kv, LeaseTerms(deadline, now))
        assert lease is not None
        return lease

    def break_one(self, now: float, spare: Lease | None = None) -> Lease | None:
        """The lease that broke; None if there was none to break."""
        before = self.leases.live()
        broke = self.leases.break_one(now, spare)
        gone = [lease for lease in before if not lease.is_live]
        assert len(gone) == broke and all(lease.state is LeaseState.BROKEN for lease in gone)
        return gone[0] if gone else None


def first_of(live: list[Lease], value: LeaseValue, now: float, spare: Lease | None = None) -> Lease | None:
    """The slow twin of `break_one`: what the table did before it had heaps."""
    return min((lease for lease in live if lease is not spare), key=lambda lease: value(lease, now), default=None)


def todays_value(lease: Lease, now: float) -> tuple[float, ...]:
    """Written down once more, so that the default policy cannot change unseen."""
    return (1, -lease.serial) if lease.state is LeaseState.CLAIMED else (0, lease.idle_since)


def rising_value(lease: Lease, now: float) -> tuple[float, ...]:
    """Rises at its own speed, in steps; equal values are frequent."""
    return (lease.claims, float(now * (lease.serial % 4) // 10), lease.deadline // 20)


@pytest.mark.parametrize("value", [lease_value, rising_value])
@pytest.mark.parametrize("seed", range(5))
def test_expiry_and_break_order_equal_full_scan(seed: int, value: LeaseValue) -> None:
    rng, now = random.Random(seed), 0.0
    rig = LeaseRig(value)
    leases, twin = rig.leases, todays_value if value is lease_value else value
    broken = expired = 0
    for _ in range(3000):
        now += rng.choice([0.0, 0.0, 0.3, 2.0])
        live = leases.live()
        action = rng.random()
        if len(live) < 4 or (action < 0.35 and len(live) < leases.budget.max_leases):
            rig.grant(now + rng.randrange(60), now)
        elif action < 0.5:
            leases.claim(rng.choice(live), now)
        elif action < 0.6:
            leases.unclaim(rng.choice(live), now)
        elif action < 0.68:
            leases.extend_lease(rng.choice(live), now + rng.randrange(60))
        elif action < 0.73:
            leases.release(rng.choice(live))
        elif action < 0.78:
            leases.orphan(rng.choice(live))
        elif action < 0.9:
            spare = rng.choice([None, *live])
            expected = first_of(live, twin, now, spare)
            assert rig.break_one(now, spare) is expected
            broken += expected is not None
        else:
            due = {x for x in live if x.state is LeaseState.GRANTED and x.deadline <= now}
            assert leases.expire(now) == len(due)
            assert {x for x in live if not x.is_live} == due
            expired += len(due)
        deadlines = [x.deadline for x in leases.live() if x.state is LeaseState.GRANTED]
        assert leases.next_deadline() == min(deadlines, default=None)
        check_leases(leases, rig.rig.cache)
    assert broken > 100 and expired > 50, "the operations are too one-sided to show anything"
    assert leases.counts.broken == broken and leases.counts.expired == expired


def test_risen_lease_value_is_noticed() -> None:
    worth = {0: 1.0, 1: 2.0, 2: 3.0}
    rig = LeaseRig(lambda lease, now: (worth[lease.serial] + (10.0 if lease.serial == 0 and now > 5.0 else 0.0),))
    cheap, middle, dear = (rig.grant(99.0) for _ in range(3))
    assert rig.break_one(1.0, spare=cheap) is middle  # all are valued now
    assert rig.break_one(6.0) is dear, "the cheapest one is worth 11 by now"
    assert rig.break_one(6.0) is cheap


def test_fallen_lease_value_is_noticed_after_extend() -> None:
    worth = {0: 1.0, 1: 2.0, 2: 3.0}
    rig = LeaseRig(lambda lease, now: (worth[lease.serial],))
    first, _, last = (rig.grant(99.0) for _ in range(3))
    assert rig.break_one(0.0) is first
    worth[2] = 0.0
    assert rig.leases.extend_lease(last, last.deadline)
    assert rig.break_one(0.0) is last


def test_only_changed_and_first_leases_are_revalued() -> None:
    asked: list[int] = []

    def value(lease: Lease, now: float) -> tuple[float, ...]:
        asked.append(lease.serial)
        return (lease.serial,)

    rig = LeaseRig(value)
    made = [rig.grant(99.0) for _ in range(40)]
    assert not asked, "nobody needs a value before a lease has to break"
    rig.break_one(0.0)
    asked.clear()
    rig.leases.claim(made[20], 0.0)
    rig.break_one(0.0)
    assert asked == [20, 1]


def test_lease_heaps_discard_dead_entries() -> None:
    rig = LeaseRig(max_leases=8)
    kept = [rig.grant(1e9) for _ in range(4)]
    for number in range(2000):
        assert rig.leases.extend_lease(kept[number % 4], 1e9 - number)
        assert rig.leases.claim(kept[3], 0.0)
        rig.leases.unclaim(kept[3], 0.0)
        lease = rig.grant(1e9, -1.0)  # has been idle for longer than the others
        assert rig.break_one(0.0, spare=kept[0]) is lease
        for heap in (rig.leases.deadlines, rig.leases.values):
            assert len(heap) <= 2 * rig.leases.budget.max_leases + SPARE_ENTRIES
    check_leases(rig.leases, rig.rig.cache)


def test_lazy_heap_keeps_live_entries_on_cleanup() -> None:
    keys: dict[int, float] = {}
    heap = LazyHeap(keys.get)
    rng = random.Random(3)
    for _ in range(5000):
        serial = rng.randrange(30)
        if rng.random() < 0.3:
            keys.pop(serial, None)
        else:
            keys[serial] = float(rng.randrange(5))
            heap.push_entry(keys[serial], serial)
        assert heap.first() == min(((key, serial) for serial, key in keys.items()), default=None)
        assert len(heap) <= 2 * 30 + SPARE_ENTRIES
    while (first := heap.pop()) is not None:
        assert first == min((key, serial) for serial, key in keys.items())
        del keys[first[1]]
    assert not keys and len(heap) == 0


def test_lazy_heap_cleanup_threshold() -> None:
    keys: dict[int, float] = {}
    heap = LazyHeap(keys.get)
    sizes = []
    for number in range(100):
        serial = number if number < 10 else 0
        keys[serial] = float(number)
        heap.push_entry(keys[serial], serial)
        sizes.append(len(heap))
    assert sizes[:70] == [*range(1, 17), *range(10, 37), *range(10, 37)] and SPARE_ENTRIES == 16


def lose_its_node(rig: LeaseRig, lease: Lease) -> None:
    assert lease.kv is not None
    lease.kv.node = None


def lose_its_sequence(rig: LeaseRig, lease: Lease) -> None:
    lease.kv = None


def lose_its_deadline(rig: LeaseRig, lease: Lease) -> None:
    lease.deadline = 5.0


def lose_its_place(rig: LeaseRig, lease: Lease) -> None:
    del rig.leases.unvalued[lease.serial]


def value_it_unseen(rig: LeaseRig, lease: Lease) -> None:
    lease.value = (0.0,)
    rig.leases.values.push_entry(lease.value, lease.serial)


def lose_its_entry(rig: LeaseRig, lease: Lease) -> None:
    del rig.leases.unvalued[lease.serial]
    lease.value = (0.0,)


def value_it_without_an_entry(rig: LeaseRig, lease: Lease) -> None:
    lease.value = (0.0,)


def file_it_twice(rig: LeaseRig, lease: Lease) -> None:
    rig.leases.unvalued[99] = lease


def miscount_tokens(rig: LeaseRig, lease: Lease) -> None:
    rig.leases.budget.tokens += 1


def miscount_leases(rig: LeaseRig, lease: Lease) -> None:
    rig.leases.budget.leases -= 1


def fill_a_heap(rig: LeaseRig, lease: Lease) -> None:
    heap = rig.leases.deadlines
    heap._entries += [(-1.0, 0)] * (2 * rig.leases.budget.max_leases + SPARE_ENTRIES + 1 - len(heap))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_its_node, "live but holds nothing"),
        (lose_its_sequence, "live but holds nothing"),
        (lose_its_deadline, "never expire"),
        (lose_its_place, "never break"),
        (lose_its_entry, "never break"),
        (value_it_without_an_entry, "never break"),
        (value_it_unseen, "never break, or would be valued in vain"),
        (file_it_twice, "2 leases are to be valued, but only 1 are live"),
        (miscount_tokens, "hold 1 tokens, 2 are counted"),
        (miscount_leases, "1 leases are live, 0 are counted"),
        (fill_a_heap, "145 entries in a heap of at most 64 leases"),
    ],
)
def test_damaged_lease_table_is_detected(damage: Callable[[LeaseRig, Lease], None], message: str) -> None:
    rig = LeaseRig()
    lease = rig.grant(10.0)
    check_leases(rig.leases, rig.rig.cache)
    damage(rig, lease)
    with pytest.raises(InvariantError, match=message):
        check_leases(rig.leases, rig.rig.cache)


def test_fullest_allowed_heap_passes_invariants() -> None:
    rig = LeaseRig()
    fill_a_heap(rig, rig.grant(10.0))
    rig.leases.deadlines._entries.pop()
    check_leases(rig.leases, rig.rig.cache)


def test_invariants_count_partial_lease_pages_as_whole() -> None:
    rig = CacheRig(page_size=4)
    leases = LeaseTable(rig.cache, LeaseBudget(4, max_tokens=1024, max_leases=4), value=lease_value)
    running = rig.start(np.arange(10, dtype=np.int32))
    assert rig.compute(running)
    rig.publish(running)
    assert leases.grant(running.kv, LeaseTerms(10.0, 0.0)) is not None and leases.leased_tokens == 12
    check_leases(leases, rig.cache)
