"""What gives way when leases are full: the least valuable, those of a client above its share first."""

from __future__ import annotations

import numpy as np
import pytest

from baton.radix.invariants import check_leases
from baton.radix.lease import Lease, LeaseState, LeaseTable, LeaseTerms
from baton.radix.lease_budget import LeaseBudget
from baton.scheduler.jobs.kept_turn import KeptTurn, Worth, has_share
from tests.doubles.cache_rig import CacheRig
from tests.doubles.policy_scene import fcfs


class Scene:
    """Leases of ten tokens each, granted one second apart. ``limits``: of the budget."""

    def __init__(self, **limits: int) -> None:
        self.rig = CacheRig(num_tokens=1024, rows=32)
        budget = LeaseBudget(1, **{"max_tokens": 1024, "max_leases": 32, **limits})
        self.table = LeaseTable(self.rig.cache, budget, value=fcfs().lease_value, has_share=has_share)
        self.now = 0.0

    def grant(self, client: str = "", prompt: np.ndarray | None = None, owner: KeptTurn | None = None) -> Lease | None:
        self.now += 1.0
        if prompt is None:
            prompt = np.arange(10, dtype=np.int32) + 100 * int(self.now)
        running = self.rig.start(prompt)
        assert self.rig.compute(running)
        self.rig.publish(running)
        lease = self.table.grant(running.kv, LeaseTerms(1e9, self.now, client, owner))
        if lease is None:
            self.rig.finish(running)
        else:
            self.rig.running.remove(running)
        check_leases(self.table, self.rig.cache)
        return lease

    def must_grant(self, client: str = "", prompt: np.ndarray | None = None, owner: KeptTurn | None = None) -> Lease:
        lease = self.grant(client, prompt, owner)
        assert lease is not None
        return lease


def test_longest_idle_lease_breaks_when_all_rows_are_taken() -> None:
    scene = Scene(max_leases=2)
    first, second = scene.must_grant(), scene.must_grant()
    third = scene.must_grant()
    assert first.state is LeaseState.BROKEN and second.is_live and third.is_live and len(scene.table) == 2


def test_grant_breaks_as_many_leases_as_its_tokens_need() -> None:
    scene = Scene(max_tokens=40)
    old = [scene.must_grant() for _ in range(4)]
    assert all(lease.is_live for lease in old), "just as much as there may be"
    large = scene.must_grant(prompt=np.arange(500, 525, dtype=np.int32))
    assert [lease.is_live for lease in old] == [False, False, False, True] and large.is_live
    assert scene.table.leased_tokens == 35


def test_grant_that_can_never_fit_breaks_no_lease() -> None:
    scene = Scene(max_tokens=20)
    kept = scene.must_grant()
    assert scene.grant(prompt=np.arange(500, 525, dtype=np.int32)) is None
    assert kept.is_live
    assert scene.grant(prompt=np.arange(500, 520, dtype=np.int32)) is not None, "all there is fits"
    assert not kept.is_live


def test_claimed_leases_do_not_break_for_new_grants() -> None:
    scene = Scene(max_leases=1)
    claimed = scene.must_grant()
    assert scene.table.claim(claimed, scene.now)
    assert scene.grant() is None and claimed.is_live
    scene.table.unclaim(claimed, scene.now)
    assert claimed.idle_since == scene.now
    assert scene.grant() is not None and not claimed.is_live


def test_single_client_may_use_the_whole_budget() -> None:
    scene = Scene(max_leases=4, max_client_leases=1, max_tokens=40, max_client_tokens=10)
    alone = [scene.must_grant("a") for _ in range(4)]
    assert all(lease.is_live for lease in alone)
    assert scene.grant("a") is not None and not alone[0].is_live, "the whole is used up: its oldest gives way"


def test_client_above_its_share_gives_way_to_others_up_to_theirs() -> None:
    scene = Scene(max_leases=4, max_client_leases=2)
    greedy = [scene.must_grant("a") for _ in range(4)]
    for lease in greedy:
        lease.owner = KeptTurn(Worth.RETURNED)
        scene.table.extend_lease(lease, lease.deadline)
    other, unnamed = scene.must_grant("b"), scene.must_grant()
    assert [lease.is_live for lease in greedy] == [False, False, True, True], "whatever they are worth"
    assert scene.grant("b") is not None and not other.is_live and unnamed.is_live
    assert all(lease.is_live for lease in greedy[2:]), "within its share, worth decides"


@pytest.mark.parametrize("others", ["", "b"])
def test_first_turns_do_not_break_leases_of_client_above_its_share(others: str) -> None:
    scene, turns = Scene(max_leases=4, max_client_leases=2), [KeptTurn(Worth.ASKED_FOR) for _ in range(3)]
    greedy = [scene.must_grant("a", owner=turn) for turn in turns]
    one_shot = scene.must_grant(others, owner=KeptTurn(Worth.FIRST_TURN))
    next_one = scene.must_grant(others, owner=KeptTurn(Worth.FIRST_TURN))
    assert not one_shot.is_live and all(lease.is_live for lease in greedy)
    turns[0].worth = Worth.FIRST_TURN  # it has been away for long
    scene.table.extend_lease(greedy[0], greedy[0].deadline)
    assert scene.grant(others, owner=KeptTurn(Worth.FIRST_TURN)) is not None
    assert [lease.is_live for lease in (*greedy, next_one)] == [False, True, True, True], "the longest idle"


@pytest.mark.parametrize("others", ["", "b"])
def test_client_above_its_share_breaks_first_turns_of_others(others: str) -> None:
    scene = Scene(max_leases=4, max_client_leases=2)
    one_shots = [scene.must_grant(others, owner=KeptTurn(Worth.FIRST_TURN)) for _ in range(4)]
    kept = [scene.must_grant("a", owner=KeptTurn(Worth.ASKED_FOR)) for _ in range(4)]
    assert all(lease.is_live for lease in kept) and not any(lease.is_live for lease in one_shots)
    assert scene.grant("a", owner=KeptTurn(Worth.FIRST_TURN)) is None and all(lease.is_live for lease in kept)


def test_client_that_would_exceed_its_share_breaks_only_its_own_leases() -> None:
    scene = Scene(max_leases=4, max_client_leases=2)
    others = [scene.must_grant("b"), scene.must_grant("c")]
    greedy = [scene.must_grant("a") for _ in range(5)]
    assert all(lease.is_live for lease in others)
    assert [lease.is_live for lease in greedy] == [False, False, False, True, True]


def test_client_token_share_breaks_only_its_own_leases() -> None:
    scene = Scene(max_tokens=40, max_client_tokens=25)
    others = [scene.must_grant("b"), scene.must_grant("c")]
    greedy = [scene.must_grant("a") for _ in range(3)]
    assert all(lease.is_live for lease in others) and [lease.is_live for lease in greedy] == [False, True, True]
    assert scene.grant("a", np.arange(5000, 5030, dtype=np.int32)) is None
    assert all(lease.is_live for lease in (*others, *greedy[1:])), "more than its share, which would not even do"


def test_claimed_leases_above_the_share_do_not_break() -> None:
    scene = Scene(max_leases=2, max_client_leases=1)
    greedy = [scene.must_grant("a"), scene.must_grant("a")]
    assert all(scene.table.claim(lease, scene.now) for lease in greedy)
    assert scene.grant("b") is None and all(lease.is_live for lease in greedy)


def test_claims_of_one_client_above_its_share_spare_no_other() -> None:
    scene = Scene(max_leases=4, max_client_leases=1)
    claimed = [scene.must_grant("a"), scene.must_grant("a")]
    assert all(scene.table.claim(lease, scene.now) for lease in claimed)
    greedy = [scene.must_grant("b"), scene.must_grant("b")]
    for lease in greedy:
        lease.owner = KeptTurn(Worth.RETURNED)
        scene.table.extend_lease(lease, lease.deadline)
    assert scene.grant("c") is not None and [lease.is_live for lease in greedy] == [False, True]


def test_released_lease_no_longer_counts_against_its_client() -> None:
    scene = Scene(max_tokens=25, max_client_tokens=25)
    small = scene.must_grant("a", np.arange(300, 304, dtype=np.int32))
    large = scene.must_grant("a", np.arange(400, 416, dtype=np.int32))
    scene.table.release(small)
    scene.must_grant("a", np.arange(500, 509, dtype=np.int32))
    assert large.is_live, "16 + 9 tokens"
    scene.must_grant("a", np.arange(600, 601, dtype=np.int32))
    assert not large.is_live, "one more is too many"


def test_unnamed_clients_have_no_client_limit() -> None:
    scene = Scene(max_leases=8, max_client_leases=1, max_client_tokens=5)
    assert len([scene.must_grant() for _ in range(8)]) == len(scene.table)


def test_shared_tokens_count_once_for_their_first_client() -> None:
    scene = Scene(max_tokens=100, max_client_tokens=25)
    shared = np.arange(700, 720, dtype=np.int32)
    first = scene.must_grant("a", shared)
    second = scene.must_grant("b", np.append(shared, [1, 2, 3]).astype(np.int32))
    assert (first.own_tokens, second.own_tokens, scene.table.leased_tokens) == (20, 3, 23)
    scene.table.release(first)
    assert scene.table.leased_tokens == 23
    scene.table.release(second)
    assert scene.table.leased_tokens == 0 and not scene.table.budget.serials_of("b")


def test_lease_refused_after_breaking_others_is_not_counted() -> None:
    scene = Scene(max_tokens=40)
    claimed = scene.must_grant()
    assert scene.table.claim(claimed, scene.now)
    shared = np.arange(700, 720, dtype=np.int32)
    broken = scene.must_grant(prompt=shared)
    assert scene.grant(prompt=np.append(shared, np.arange(800, 815, dtype=np.int32))) is None
    assert not broken.is_live and scene.table.leased_tokens == 10


@pytest.mark.parametrize("client", ["", "a"])
def test_lease_value_is_evaluated_at_the_current_time(client: str) -> None:
    """The one that is worth least now gives way, not the one that was."""
    rig = CacheRig(num_tokens=1024, rows=8)
    budget = LeaseBudget(1, max_tokens=1024, max_leases=2, max_client_leases=2)
    rising = {0: 1.0, 1: 0.0, 2: 9.0}
    table = LeaseTable(rig.cache, budget, value=lambda lease, now: (lease.serial + rising[lease.serial] * now,))
    made = []
    for first in (0, 100, 200):
        running = rig.start(np.arange(first, first + 10, dtype=np.int32))
        assert rig.compute(running)
        made.append(table.grant(running.kv, LeaseTerms(1e9, 3.0, client)))
    assert [lease is not None and lease.is_live for lease in made] == [True, False, True]


def test_make_room_for_empty_lease_at_the_limit_breaks_none() -> None:
    scene = Scene(max_tokens=20, max_client_tokens=10)
    both = [scene.must_grant("a"), scene.must_grant("b")]
    assert scene.table.make_room(LeaseTerms(1e9, scene.now, "a")) and scene.table.make_room(LeaseTerms(1e9, scene.now))
    assert all(lease.is_live for lease in both)


def test_exceeded_by_distinguishes_client_and_overall_limits() -> None:
    budget = LeaseBudget(1, max_tokens=10, max_leases=3, max_client_tokens=6, max_client_leases=2)
    budget.add_lease("a", 0, 3)
    budget.tokens = 10
    assert [budget.exceeded_by("a", brought) for brought in (3, 4)] == [None, None], "the whole is not used up"
    budget.tokens = 11
    assert [budget.exceeded_by("a", brought) for brought in (3, 4)] == ["all", "client"]
    assert budget.exceeded_by("b", 0) == budget.exceeded_by("", 0) == "all"
    budget.tokens = 0
    budget.add_lease("a", 1, 0)
    assert budget.exceeded_by("a", 0) is None and not budget.clients_above_share()
    budget.add_lease("a", 2, 0)
    assert budget.clients_above_share() == ["a"]
    assert budget.exceeded_by("a", 0) == "client" and budget.exceeded_by("b", 0) == "all"
    assert [budget.never_holds("a", tokens) for tokens in (10, 11)] == [False, True]
    budget.tokens = 20
    assert [budget.never_holds(client, 10) for client in ("", "b")] == [False, True], "others hold 20"
    assert budget.never_holds("b", 6) is False, "its share"
    budget.clear()
    assert (budget.tokens, budget.leases, budget.serials_of("a")) == (0, 0, [])


@pytest.mark.parametrize("how", ["release", "hand_off", "exchange"])
def test_tokens_still_leased_count_for_the_lease_that_is_left(how: str) -> None:
    """Otherwise a client whose leases share tokens could take the share of others with tokens that count nowhere."""
    scene = Scene(max_tokens=100, max_client_tokens=50)
    shared = np.arange(700, 780, dtype=np.int32)
    first = scene.must_grant("a", shared)
    second = scene.must_grant("a", np.append(shared, [1, 2, 3]).astype(np.int32))
    third = scene.must_grant("a", np.append(shared[:40], [4]).astype(np.int32))
    for lease in (second, third):
        lease.owner = KeptTurn(Worth.RETURNED)
        scene.table.extend_lease(lease, lease.deadline)
    if how == "release":
        scene.table.release(first)
    elif how == "hand_off":
        scene.rig.cache.release(scene.table.hand_off(first))
    else:
        running = scene.rig.start(np.arange(5, dtype=np.int32))
        assert scene.rig.compute(running)
        assert scene.table.exchange(first, running.kv)
        scene.table.release(first)
    check_leases(scene.table, scene.rig.cache)
    assert (second.own_tokens, third.own_tokens) == (83, 1)
    assert scene.table.budget.clients_above_share() == ["a"]
    newcomer = scene.grant("b", np.arange(900, 940, dtype=np.int32))
    assert newcomer is not None and not second.is_live and third.own_tokens == 41
