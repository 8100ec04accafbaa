"""What all policies share: who may pass, who is retracted, what a lease is worth."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.lease import Lease, LeaseState, LeaseTable, LeaseTerms
from baton.radix.lease_budget import LeaseBudget
from baton.scheduler.policies.base import BasePolicy
from baton.scheduler.request import Request
from tests.doubles.cache_rig import CacheRig
from tests.doubles.policy_scene import (
    FILL_TIME,
    admit,
    claimed_lease,
    fcfs,
    granted_lease,
    returning_child,
    waiting_request,
)


class NewestFirst(BasePolicy):
    """An order of its own that the shared rules must keep."""

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        return waiting[::-1]


class TestOrder:
    def test_children_with_a_lease_come_first_and_each_group_stays_as_ranked(self) -> None:
        plain = [waiting_request(0), waiting_request(2), waiting_request(4)]
        children = [returning_child(1), returning_child(3)]
        queue = [plain[0], children[0], plain[1], children[1], plain[2]]
        assert fcfs().order(queue, 9.0) == [*children, *plain]
        assert NewestFirst(FILL_TIME).order(queue, 9.0) == [*children[::-1], *plain[::-1]]

    @pytest.mark.parametrize("state", [LeaseState.BROKEN, LeaseState.EXPIRED, LeaseState.HANDED_OFF])
    def test_a_child_whose_lease_is_over_waits_like_all_others(self, state: LeaseState) -> None:
        child = returning_child(1, lease=Lease(None, 0.0, 0, state=state))
        queue = [waiting_request(0), child, waiting_request(2)]
        assert fcfs().order(queue, 9.0) == queue
        returning = returning_child(3)
        assert fcfs().order([*queue, returning], 9.0) == [returning, *queue]

    def test_the_queue_itself_is_not_touched(self) -> None:
        queue = [waiting_request(0), returning_child(1)]
        before = list(queue)
        fcfs().order(queue, 9.0)
        assert queue == before


class TestPassing:
    def pass_head(self, policy: BasePolicy, head: Request, times: int, first: int = 1) -> None:
        for number in range(first, first + times):
            child = returning_child(number)
            assert policy.order([head, child], 0.0) == [child, head]
            policy.note_admission(admit(child), 0.0)

    def test_the_head_of_the_queue_is_passed_so_many_times_and_no_more(self) -> None:
        policy, head = fcfs(), waiting_request(0)
        self.pass_head(policy, head, policy.max_passes)
        last = returning_child(500)
        assert policy.order([head, last], 0.0) == [head, last]

    def test_the_next_head_is_passed_as_often(self) -> None:
        policy, head = fcfs(), waiting_request(0)
        self.pass_head(policy, head, policy.max_passes)
        policy.note_admission(head, 0.0)
        self.pass_head(policy, waiting_request(600), policy.max_passes, first=601)

    def test_a_child_that_arrived_before_the_head_passes_nobody(self) -> None:
        policy, head = fcfs(), waiting_request(100)
        for number in range(2 * policy.max_passes):
            policy.order([returning_child(number), head], 0.0)
            policy.note_admission(admit(returning_child(number)), 0.0)
        self.pass_head(policy, head, policy.max_passes, first=101)

    def test_requests_without_a_parent_are_not_counted(self) -> None:
        policy, head = fcfs(), waiting_request(0)
        policy.order([head, returning_child(1)], 0.0)
        for number in range(2, 2 + policy.max_passes):
            policy.note_admission(waiting_request(number), 0.0)
        self.pass_head(policy, head, policy.max_passes, first=200)


class TestVictim:
    def test_the_newest_gives_way_wherever_it_stands(self) -> None:
        running = [waiting_request(number) for number in (3, 7, 1)]
        assert fcfs().victim(running, None, 9.0) is running[1]

    def test_of_those_that_arrived_together_the_later_one(self) -> None:
        running = [waiting_request(number) for number in (5, 4, 6)]
        for request in running:
            request.arrival = 2.0
        assert fcfs().victim(running, None, 9.0) is running[2]

    def test_a_prompt_that_is_partly_computed_is_one_of_them(self) -> None:
        older, newer = waiting_request(0), waiting_request(8)
        assert fcfs().victim([newer], older, 9.0) is newer
        assert fcfs().victim([older], newer, 9.0) is newer

    def test_the_last_one_is_retracted_itself(self) -> None:
        alone = waiting_request(0)
        assert fcfs().victim([alone], None, 9.0) is alone


class TestPriority:
    def test_a_higher_one_goes_first_and_arrival_settles_ties(self) -> None:
        waiting = [
            waiting_request(0),
            waiting_request(1, priority=5),
            waiting_request(2),
            waiting_request(3, priority=5),
        ]
        order = fcfs().order(waiting, 0.0)
        assert [request.serial for request in order] == [1, 3, 0, 2]

    def test_children_with_a_lease_pass_equals_only(self) -> None:
        waiting = [waiting_request(0, priority=5), waiting_request(1), returning_child(2)]
        order = fcfs().order(waiting, 0.0)
        assert [request.serial for request in order] == [0, 2, 1]

    def test_the_lowest_is_retracted_first(self) -> None:
        policy = fcfs()
        running = [waiting_request(0, priority=5), waiting_request(1, priority=-1), waiting_request(2, priority=3)]
        assert policy.victim(running, None, 9.0) is running[1]
        assert policy.victim(running, waiting_request(3, priority=1), 9.0) is running[1]
        lowest = waiting_request(4, priority=-1)
        assert policy.victim(running, lowest, 9.0) is lowest
        assert policy.victim([running[0], running[2]], None, 9.0) is running[2]

    def test_the_oldest_gives_way_to_no_priority(self) -> None:
        oldest, urgent = waiting_request(0, priority=-9), waiting_request(1, priority=9)
        assert fcfs().victim([oldest, urgent], None, 9.0) is urgent
        assert fcfs().victim([urgent], oldest, 9.0) is urgent


class TestLeases:
    def test_granted_before_claimed_the_longest_idle_and_the_youngest_claim_first(self) -> None:
        policy = fcfs()
        order = [
            granted_lease(5, 10.0),
            granted_lease(0, 11.0),
            granted_lease(3, 1e6),
            claimed_lease(9, 1.0),
            claimed_lease(2, 90.0),
            claimed_lease(1, 3.0),
        ]
        for seed in range(5):
            mixed = list(order)
            random.Random(seed).shuffle(mixed)
            assert sorted(mixed, key=lambda lease: policy.lease_value(lease, 0.0)) == order

    def test_values_agree_with_the_order_in_which_a_table_breaks(self) -> None:
        rig, policy, rng = CacheRig(), fcfs(), random.Random(3)
        leases = LeaseTable(rig.cache, LeaseBudget(1, max_tokens=1024, max_leases=8), value=policy.lease_value)
        for i in range(8):
            running = rig.start(np.arange(100 * i, 100 * i + 10, dtype=np.int32))
            assert rig.compute(running)
            lease = leases.grant(running.kv, LeaseTerms(1e9, rng.random()))
            assert lease is not None and (i % 3 or leases.claim(lease, 0.0))
        while live := leases.live():
            least = min(live, key=lambda lease: policy.lease_value(lease, 1.0))
            leases.break_one(1.0)
            assert least.state is LeaseState.BROKEN

    def test_one_that_is_idle_for_longer_than_the_pool_takes_to_fill_breaks_for_newcomers(self) -> None:
        policy, lease = fcfs(), granted_lease(0, idle_since=100.0)
        assert not policy.may_break_for(waiting_request(0), lease, 100.0 + FILL_TIME.seconds)
        assert policy.may_break_for(waiting_request(0), lease, 100.1 + FILL_TIME.seconds)

    def test_a_claimed_one_breaks_for_no_newcomer(self) -> None:
        assert not fcfs().may_break_for(waiting_request(0), claimed_lease(0, idle_since=0.0), 1e6)


class TestOvertaking:
    """Whatever is ranked first, the oldest is not passed for ever."""

    def overtake(self, policy: BasePolicy, oldest: Request, times: int) -> int:
        """Admit one later request after the other, each the policy's first choice; how many there were."""
        for number in range(1, times + 1):
            urgent = waiting_request(number, priority=3)
            if policy.order([oldest, urgent], 0.0)[0] is not urgent:
                return number - 1
            policy.note_admission(urgent, 0.0)
        return times

    def test_the_oldest_comes_first_after_so_many_of_a_higher_priority(self) -> None:
        policy, oldest = fcfs(), waiting_request(0)
        assert self.overtake(policy, oldest, 1000) == policy.max_overtakes
        assert policy.overdue is oldest
        policy.note_admission(oldest, 0.0)
        next_oldest = waiting_request(5000)
        assert policy.order([next_oldest], 0.0) == [next_oldest] and policy.overdue is None

    def test_an_older_one_that_comes_back_does_not_set_the_count_back(self) -> None:
        """Retracted, or woken by its parent's end: it would be a way to have somebody passed for ever."""
        policy, again, oldest = fcfs(), waiting_request(0, priority=1), waiting_request(1)
        for number in range(2, 2 + policy.max_overtakes):
            if number % 50 == 0:
                assert policy.order([again, oldest], 0.0) == [again, oldest]
                policy.note_admission(again, 0.0)
            urgent = waiting_request(number, priority=3)
            assert policy.order([oldest, urgent], 0.0)[0] is urgent
            policy.note_admission(urgent, 0.0)
        assert policy.order([oldest, waiting_request(9999, priority=3)], 0.0)[0] is policy.overdue is oldest

    def test_who_passes_the_one_that_came_back_passes_both(self) -> None:
        policy, again, oldest = fcfs(), waiting_request(0), waiting_request(1)
        assert policy.order([oldest], 0.0) == [oldest]
        for number in range(2, 2 + policy.max_overtakes):
            urgent = waiting_request(number, priority=3)
            assert policy.order([again, oldest, urgent], 0.0)[0] is urgent
            policy.note_admission(urgent, 0.0)
        assert policy.order([again, oldest], 0.0)[0] is policy.overdue is again
        policy.note_admission(again, 0.0)
        assert policy.order([oldest, waiting_request(9999, priority=3)], 0.0)[0] is policy.overdue is oldest

    def test_an_order_of_the_policys_own_is_bound_too(self) -> None:
        policy, oldest, middle = NewestFirst(FILL_TIME), waiting_request(0), waiting_request(1)
        for number in range(2, 2 + policy.max_overtakes):
            newest = waiting_request(number)
            assert policy.order([oldest, middle, newest], 0.0) == [newest, middle, oldest]
            policy.note_admission(newest, 0.0)
        newest = waiting_request(9999)
        assert policy.order([oldest, middle, newest], 0.0) == [oldest, newest, middle]
