"""Leases: every arrow of the state machine, what the budget counts, and that each end gives back just what it held."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.cuts import fork_sequence, truncate
from baton.radix.invariants import check_leases
from baton.radix.lease import Lease, LeaseCounts, LeaseState, LeaseTable, LeaseTerms
from baton.radix.lease_budget import LeaseBudget
from tests.doubles.cache_rig import CacheRig, Running
from tests.doubles.policy_scene import fcfs

lease_value = fcfs().lease_value

PAGES = pytest.mark.parametrize("page", [1, 4, 16])


def tokens(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def lease_table(rig: CacheRig, *, max_tokens: int = 1024, max_leases: int = 8) -> LeaseTable:
    budget = LeaseBudget(rig.cache.page_size, max_tokens=max_tokens, max_leases=max_leases)
    return LeaseTable(rig.cache, budget, value=lease_value)


def leased_by_hand(rig: CacheRig, leases: LeaseTable) -> int:
    """Distinct pages under live leases, in tokens: the slow twin of ``leased_tokens``."""
    page = rig.cache.page_size
    pages: set[int] = set()
    for lease in leases.live():
        assert lease.kv is not None
        pages |= set((rig.pool.rows[lease.kv.row, : lease.kv.length] // page).tolist())
    return len(pages) * page


def lease_of(rig: CacheRig, leases: LeaseTable, ids: np.ndarray, deadline: float) -> tuple[Lease, Running]:
    running = rig.start(ids)
    assert rig.compute(running)
    rig.publish(running)
    lease = leases.grant(running.kv, LeaseTerms(deadline, 0.0))
    assert lease is not None
    return lease, running


@PAGES
class TestStates:
    def test_handoff_passes_on_the_whole_sequence(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        leases = lease_table(rig, max_tokens=1024, max_leases=8)
        lease, running = lease_of(rig, leases, tokens(50), 10.0)
        kv = lease.kv
        assert leases.claim(lease, 3.0) and lease.state is LeaseState.CLAIMED
        assert leases.expire(99.0) == 0, "a claim stops the clock"
        assert leases.hand_off(lease) is kv
        assert lease.state is LeaseState.HANDED_OFF and leases.leased_tokens == 0 and len(leases) == 0
        rig.verify()
        rig.finish(running)
        rig.verify()

    def test_unclaimed_lease_gets_its_remaining_time_back(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        leases = lease_table(rig, max_tokens=1024, max_leases=8)
        lease, running = lease_of(rig, leases, tokens(50), 10.0)
        assert leases.claim(lease, 4.0) and leases.claim(lease, 5.0)
        leases.unclaim(lease, 20.0)
        assert lease.state is LeaseState.CLAIMED
        leases.unclaim(lease, 30.0)
        assert lease.state is LeaseState.GRANTED and lease.deadline == 36.0 == leases.next_deadline()
        assert leases.expire(35.9) == 0
        rig.running.remove(running)
        assert leases.expire(36.0) == 1
        assert lease.state is LeaseState.EXPIRED and not leases.claim(lease, 36.0)
        assert rig.verify().request_private == 0

    def test_lease_can_be_claimed_at_its_deadline(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        leases = lease_table(rig)
        lease, _ = lease_of(rig, leases, tokens(50), 10.0)
        assert not leases.claim(lease, 10.1) and leases.claim(lease, 10.0)
        leases.unclaim(lease, 12.0)
        assert lease.deadline == 12.0 and lease.idle_since == 12.0

    @pytest.mark.parametrize("end", ["release", "break", "expire"])
    def test_every_lease_end_frees_row_lock_and_tail(self, page: int, end: str) -> None:
        rig = CacheRig(page_size=page)
        leases = lease_table(rig, max_tokens=1024, max_leases=8)
        lease, running = lease_of(rig, leases, tokens(53), 10.0)
        rig.running.remove(running)
        if end == "release":
            leases.release(lease)
            leases.release(lease)
        elif end == "break":
            assert leases.break_one(0.0) and not leases.break_one(0.0)
        else:
            assert leases.expire(10.0) == 1
        account = rig.verify()
        assert account.protected == account.request_private == 0
        assert account.evictable == 53 - 53 % page, "whole pages stay findable"
        assert leases.leased_tokens == 0
        assert (
            leases.counts
            == {
                "release": LeaseCounts(granted=1, released=1),
                "break": LeaseCounts(granted=1, broken=1),
                "expire": LeaseCounts(granted=1, expired=1),
            }[end]
        )
        with pytest.raises(ValueError, match="already"):
            leases.hand_off(lease)

    def test_only_granted_leases_can_be_extended(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        leases = lease_table(rig, max_tokens=1024, max_leases=8)
        lease, _ = lease_of(rig, leases, tokens(20), 10.0)
        assert leases.extend_lease(lease, 50.0) and leases.expire(49.0) == 0
        leases.claim(lease, 1.0)
        assert not leases.extend_lease(lease, 90.0)


def test_least_valuable_lease_breaks_first_and_claimed_ones_last() -> None:
    rig = CacheRig()
    leases = lease_table(rig, max_tokens=1024, max_leases=8)
    made = [lease_of(rig, leases, tokens(10, 100 * i), 10.0 + i)[0] for i in range(4)]
    rig.running.clear()
    leases.claim(made[0], 0.0)
    order = []
    while leases.break_one(0.0):
        order.append(next(i for i, lease in enumerate(made) if lease.kv is None and i not in order))
    assert order == [1, 2, 3, 0]
    assert rig.verify().protected == 0


def test_spared_lease_is_not_broken() -> None:
    rig = CacheRig()
    leases = lease_table(rig, max_tokens=1024, max_leases=8)
    lease, _ = lease_of(rig, leases, tokens(10), 10.0)
    assert not leases.break_one(0.0, spare=lease) and lease.is_live


def test_grant_over_budget_leaves_sequence_to_caller() -> None:
    rig = CacheRig()
    leases = lease_table(rig, max_tokens=60, max_leases=2)
    lease_of(rig, leases, tokens(40), 10.0)
    running = rig.start(tokens(30, 500))
    assert rig.compute(running)
    rig.publish(running)
    assert leases.grant(running.kv, LeaseTerms(10.0, 0.0)) is None
    assert leases.leased_tokens == 40
    rig.verify()
    # What it shares with a lease counts once, so this one fits.
    shared = np.concatenate([tokens(38), tokens(10, 700)])
    lease_of(rig, leases, shared, 10.0)
    assert leases.leased_tokens == 50
    third = rig.start(tokens(5, 900))
    assert rig.compute(third)
    assert leases.grant(third.kv, LeaseTerms(10.0, 0.0)) is None, "as many leases as there may be"


def test_lease_ends_are_counted_by_kind() -> None:
    rig = CacheRig()
    leases = lease_table(rig, max_leases=16)
    for end, count in (("hand_off", 2), ("release", 3), ("break_lease", 4)):
        for number in range(count):
            getattr(leases, end)(lease_of(rig, leases, tokens(3, 100 * number), 10.0)[0])
    assert leases.counts == LeaseCounts(granted=9, handed_off=2, released=3, broken=4)


@pytest.mark.parametrize("end", ["break_all", "discard_leases"])
def test_break_all_and_discard_leases_end_all_leases(end: str) -> None:
    rig = CacheRig()
    leases = lease_table(rig, max_leases=3)
    for first in (0, 100):
        lease_of(rig, leases, tokens(12, first), 10.0)
    leases.break_one(0.0)
    made = [lease_of(rig, leases, tokens(12, first), 10.0)[0] for first in (200, 300)]
    assert leases.claim(made[0], 0.0)
    rig.running.clear()
    getattr(leases, end)()
    assert all(lease.state is LeaseState.BROKEN and not lease.is_live for lease in made)
    assert len(leases) == leases.leased_tokens == 0 and leases.counts == LeaseCounts(granted=4, broken=4)
    if end == "discard_leases":
        rig.cache.discard_all()
    check_leases(leases, rig.cache)
    assert rig.verify().protected == 0
    made = [lease_of(rig, leases, tokens(12, first), 10.0)[0] for first in (0, 100, 200)]
    assert all(lease.is_live for lease in made), "the budget is free again"


def test_orphaned_lease_ends_when_no_longer_claimed() -> None:
    rig = CacheRig()
    leases = lease_table(rig)
    unclaimed, claimed = (lease_of(rig, leases, tokens(10, first), 50.0)[0] for first in (0, 100))
    assert leases.claim(claimed, 1.0)
    for lease in (unclaimed, claimed):
        leases.orphan(lease)
    assert unclaimed.state is LeaseState.RELEASED and claimed.state is LeaseState.CLAIMED
    leases.unclaim(claimed, 7.0)
    assert leases.next_deadline() == 7.0 and leases.expire(7.0) == 1
    leases.orphan(claimed)
    assert claimed.state is LeaseState.EXPIRED, "what has ended stays as it is"


@pytest.mark.parametrize("ends_first", [False, True])
def test_leased_pages_written_by_step_in_flight_are_quarantined(ends_first: bool) -> None:
    rig = CacheRig()
    leases = lease_table(rig)
    running = rig.start(tokens(15))
    assert rig.compute(running, 10)
    rig.publish(running)
    assert rig.extend(running, 15)
    fence = rig.allocator.fences.open_fence()
    lease = leases.grant(running.kv, LeaseTerms(10.0, 0.0), written_by=fence)
    assert lease is not None
    if ends_first:
        rig.close(fence)
    rig.running.clear()
    leases.release(lease)
    assert rig.verify().quarantined == (0 if ends_first else 5)
    if not ends_first:
        rig.close(fence)
    assert rig.verify().quarantined == 0


@PAGES
def test_leased_tokens_count_shared_pages_once(page: int) -> None:
    rng = random.Random(page)
    print("seed", page)
    rig = CacheRig(num_tokens=2048, page_size=page, rows=16)
    leases = lease_table(rig, max_tokens=2048, max_leases=16)
    stem = tokens(80)
    for _ in range(400):
        live = leases.live()
        action = rng.random()
        if action < 0.5 and len(live) < 12:
            ids = np.concatenate([stem[: rng.randrange(80)], tokens(rng.randrange(1, 40), 1000 * rng.randrange(5))])
            lease_of(rig, leases, ids, rng.random() * 100)
        elif live:
            lease = rng.choice(live)
            running = next(r for r in rig.running if r.kv is lease.kv)
            rig.running.remove(running)
            if action < 0.7:
                leases.release(lease)
            elif action < 0.85:
                rig.running.append(running)
                leases.hand_off(lease)
                rig.finish(running)
            else:
                rig.running.append(running)
                leases.claim(lease, 0.0)
        assert leases.leased_tokens == leased_by_hand(rig, leases)
        rig.verify()


@PAGES
class TestCutsAndForks:
    @pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 30, 31, 49, 50])
    def test_truncated_sequence_can_be_extended(self, page: int, length: int) -> None:
        rig = CacheRig(page_size=page)
        running = rig.start(tokens(50))
        assert rig.compute(running, 31)
        rig.publish(running)
        assert rig.compute(running, 50)
        truncate(rig.cache, running.kv, length)
        kept = running.kv.length
        assert kept == (length if length >= running.kv.tree_len and length > 31 - 31 % page else length - length % page)
        running.ids = np.concatenate([running.ids[:kept], tokens(20, 300)])
        running.committed = kept
        assert rig.compute(running)
        rig.verify()
        rig.finish(running)
        rig.verify()

    def test_truncate_quarantines_pages_under_fence(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        running = rig.start(tokens(50))
        assert rig.compute(running)
        fence = rig.allocator.fences.open_fence()
        truncate(rig.cache, running.kv, 20, fence=fence)
        running.committed = 20
        assert rig.verify().quarantined == -(-50 // page) * page - -(-20 // page) * page
        rig.close(fence)
        assert rig.verify().quarantined == 0

    def test_fork_shares_the_path_and_copies_the_tail(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        running = rig.start(tokens(50))
        assert rig.compute(running, 33)
        rig.publish(running)
        row = rig.pool.alloc()
        assert row is not None
        forked = fork_sequence(rig.cache, running.kv, 33, row)
        assert forked is not None
        kv, source, target = forked
        assert len(source) == len(target) == 33 % page
        for s, t in zip(source.tolist(), target.tolist()):
            rig.kv[t] = rig.kv[s]
        other = Running(kv, np.concatenate([tokens(33), tokens(9, 900)]), 33)
        rig.running.append(other)
        assert rig.compute(other) and rig.compute(running)
        rig.verify()
        rig.finish(running)
        rig.verify()
        rig.finish(other)
        rig.verify()

    def test_slots_of_a_fork_are_int32(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        running = rig.start(tokens(50))
        assert rig.compute(running, 32)
        rig.publish(running)
        assert rig.compute(running, 33)  # one token of its own
        row = rig.pool.alloc()
        assert row is not None
        forked = fork_sequence(rig.cache, running.kv, 33, row)
        assert forked is not None and [slots.dtype for slots in forked[1:]] == [np.int32, np.int32]

    def test_fork_without_a_free_page_changes_nothing(self, page: int) -> None:
        rig = CacheRig(num_tokens=64, page_size=page)
        running = rig.start(tokens(64))
        assert rig.compute(running)
        row = rig.pool.alloc()
        assert row is not None
        assert fork_sequence(rig.cache, running.kv, 63, row) is None
        rig.pool.free(row)
        rig.verify()
