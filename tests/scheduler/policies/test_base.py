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
    def test_child_with_ended_lease_has_no_precedence(self, state: LeaseState) -> None:
        child = returning_child(1, lease=Lease(None, 0.0, 0, state=state))
        queue = [waiting_request(0), child, waiting_request(2)]
        assert fcfs().order(queue, 9.0) == queue
        returning = returning_child(3)
        assert fcfs().order([*queue, returning], 9.0) == [returning, *queue]

    def test_order_does_not_modify_the_queue(self) -> None:
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

    def test_head_of_queue_is_passed_at_most_max_passes_times(self) -> None:
        policy, head = fcfs(), waiting_request(0)
        self.pass_head(policy, head, policy.max_passes)
        last = returning_child(500)
        assert policy.order([head, last], 0.0) == [head, last]

    def test_pass_limit_restarts_for_next_head(self) -> None:
        policy, head = fcfs(), waiting_request(0)
        self.pass_head(policy, head, policy.max_passes)
        policy.note_admission(head, 0.0)
        self.pass_head(policy, waiting_request(600), policy.max_passes, first=601)

    def test_child_older_than_head_does_not_count_as_pass(self) -> None:
        policy, head = fcfs(), waiting_request(100)
        for number in range(2 * policy.max_passes):
            policy.order([returning_child(number), head], 0.0)
            policy.note_admission(admit(returning_child(number)), 0.0)
        self.pass_head(policy, head, policy.max_passes, first=101)

    def test_admitted_requests_without_parent_do_not_count_as_pass(self) -> None:
        policy, head = fcfs(), waiting_request(0)
        policy.order([head, returning_child(1)], 0.0)
        for number in range(2, 2 + policy.max_passes):
            policy.note_admission(waiting_request(number), 0.0)
        self.pass_head(policy, head, policy.max_passes, first=200)


class TestVictim:
    def test_newest_request_is_victim_at_any_position(self) -> None:
        running = [waiting_request(number) for number in (3, 7, 1)]
        assert fcfs().victim(running, None, 9.0) is running[1]

    def test_later_serial_is_victim_among_equal_arrivals(self) -> None:
        running = [waiting_request(number) for number in (5, 4, 6)]
        for request in running:
            request.arrival = 2.0
        assert fcfs().victim(running, None, 9.0) is running[2]

    def test_partly_computed_prompt_can_be_victim(self) -> None:
        older, newer = waiting_request(0), waiting_request(8)
        assert fcfs().victim([newer], older, 9.0) is newer
        assert fcfs().victim([older], newer, 9.0) is newer

    def test_single_running_request_is_its_own_victim(self) -> None:
        alone = waiting_request(0)
        assert fcfs().victim([alone], None, 9.0) is alone


class TestPriority:
    def test_higher_priority_is_ordered_first_and_ties_by_arrival(self) -> None:
        waiting = [
            waiting_request(0),
            waiting_request(1, priority=5),
            waiting_request(2),
            waiting_request(3, priority=5),
        ]
        order = fcfs().order(waiting, 0.0)
        assert [request.serial for request in order] == [1, 3, 0, 2]

    def test_children_with_lease_pass_only_equal_priorities(self) -> None:
        waiting = [waiting_request(0, priority=5), waiting_request(1), returning_child(2)]
        order = fcfs().order(waiting, 0.0)
        assert [request.serial for request in order] == [0, 2, 1]

    def test_lowest_priority_is_retracted_first(self) -> None:
        policy = fcfs()
        running = [waiting_request(0, priority=5), waiting_request(1, priority=-1), waiting_request(2, priority=3)]
        assert policy.victim(running, None, 9.0) is running[1]
        assert policy.victim(running, waiting_request(3, priority=1), 9.0) is running[1]
        lowest = waiting_request(4, priority=-1)
        assert policy.victim(running, lowest, 9.0) is lowest
        assert policy.victim([running[0], running[2]], None, 9.0) is running[2]

    def test_oldest_request_is_no_victim_whatever_its_priority(self) -> None:
        oldest, urgent = waiting_request(0, priority=-9), waiting_request(1, priority=9)
        assert fcfs().victim([oldest, urgent], None, 9.0) is urgent
        assert fcfs().victim([urgent], oldest, 9.0) is urgent


class TestLeases:
    def test_lease_value_orders_granted_by_idle_time_before_claimed(self) -> None:
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

    def test_lease_values_agree_with_break_order(self) -> None:
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

    def test_lease_idle_beyond_fill_time_breaks_for_newcomers(self) -> None:
        policy, lease = fcfs(), granted_lease(0, idle_since=100.0)
        assert not policy.may_break_for(waiting_request(0), lease, 100.0 + FILL_TIME.seconds)
        assert policy.may_break_for(waiting_request(0), lease, 100.1 + FILL_TIME.seconds)

    def test_claimed_lease_breaks_for_no_newcomer(self) -> None:
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

    def test_oldest_is_ordered_first_after_max_overtakes(self) -> None:
        policy, oldest = fcfs(), waiting_request(0)
        assert self.overtake(policy, oldest, 1000) == policy.max_overtakes
        assert policy.overdue is oldest
        policy.note_admission(oldest, 0.0)
        next_oldest = waiting_request(5000)
        assert policy.order([next_oldest], 0.0) == [next_oldest] and policy.overdue is None

    def test_returning_older_request_does_not_reset_overtake_count(self) -> None:
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

    def test_overtaking_a_returned_request_counts_for_both(self) -> None:
        policy, again, oldest = fcfs(), waiting_request(0), waiting_request(1)
        assert policy.order([oldest], 0.0) == [oldest]
        for number in range(2, 2 + policy.max_overtakes):
            urgent = waiting_request(number, priority=3)
            assert policy.order([again, oldest, urgent], 0.0)[0] is urgent
            policy.note_admission(urgent, 0.0)
        assert policy.order([again, oldest], 0.0)[0] is policy.overdue is again
        policy.note_admission(again, 0.0)
        assert policy.order([oldest, waiting_request(9999, priority=3)], 0.0)[0] is policy.overdue is oldest

    def test_overtake_limit_applies_to_custom_order(self) -> None:
        policy, oldest, middle = NewestFirst(FILL_TIME), waiting_request(0), waiting_request(1)
        for number in range(2, 2 + policy.max_overtakes):
            newest = waiting_request(number)
            assert policy.order([oldest, middle, newest], 0.0) == [newest, middle, oldest]
            policy.note_admission(newest, 0.0)
        newest = waiting_request(9999)
        assert policy.order([oldest, middle, newest], 0.0) == [oldest, newest, middle]
