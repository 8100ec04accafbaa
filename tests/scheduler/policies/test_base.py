"""What all policies share: who may pass, who is retracted, what a lease is worth."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cache_rig import CacheRig
from policy_scene import admit, claimed_lease, granted_lease, returning_child, waiting_request

from baton.radix.lease import Lease, LeaseState, LeaseTable
from baton.scheduler.policies.base import BasePolicy
from baton.scheduler.policies.fcfs import FirstComeFirstServed
from baton.scheduler.request import Request


class NewestFirst(BasePolicy):
    """An order of its own that the shared rules must keep."""

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        return waiting[::-1]


class TestOrder:
    def test_children_with_a_lease_come_first_and_each_group_stays_as_ranked(self) -> None:
        plain = [waiting_request(0), waiting_request(2), waiting_request(4)]
        children = [returning_child(1), returning_child(3)]
        queue = [plain[0], children[0], plain[1], children[1], plain[2]]
        assert FirstComeFirstServed().order(queue, 9.0) == [*children, *plain]
        assert NewestFirst().order(queue, 9.0) == [*children[::-1], *plain[::-1]]

    @pytest.mark.parametrize("state", [LeaseState.BROKEN, LeaseState.EXPIRED, LeaseState.HANDED_OFF])
    def test_a_child_whose_lease_is_over_waits_like_all_others(self, state: LeaseState) -> None:
        child = returning_child(1, lease=Lease(None, 0.0, 0, state=state))
        queue = [waiting_request(0), child, waiting_request(2)]
        assert FirstComeFirstServed().order(queue, 9.0) == queue
        returning = returning_child(3)
        assert FirstComeFirstServed().order([*queue, returning], 9.0) == [returning, *queue]

    def test_the_queue_itself_is_not_touched(self) -> None:
        queue = [waiting_request(0), returning_child(1)]
        before = list(queue)
        FirstComeFirstServed().order(queue, 9.0)
        assert queue == before


class TestPassing:
    def pass_head(self, policy: BasePolicy, head: Request, times: int, first: int = 1) -> None:
        for number in range(first, first + times):
            child = returning_child(number)
            assert policy.order([head, child], 0.0) == [child, head]
            policy.admitted(admit(child), 0.0)

    def test_the_head_of_the_queue_is_passed_so_many_times_and_no_more(self) -> None:
        policy, head = FirstComeFirstServed(), waiting_request(0)
        self.pass_head(policy, head, policy.max_passes)
        last = returning_child(500)
        assert policy.order([head, last], 0.0) == [head, last]

    def test_the_next_head_is_passed_as_often(self) -> None:
        policy, head = FirstComeFirstServed(), waiting_request(0)
        self.pass_head(policy, head, policy.max_passes)
        policy.admitted(head, 0.0)
        self.pass_head(policy, waiting_request(600), policy.max_passes, first=601)

    def test_a_child_that_arrived_before_the_head_passes_nobody(self) -> None:
        policy, head = FirstComeFirstServed(), waiting_request(100)
        for number in range(2 * policy.max_passes):
            policy.order([returning_child(number), head], 0.0)
            policy.admitted(admit(returning_child(number)), 0.0)
        self.pass_head(policy, head, policy.max_passes, first=101)

    def test_requests_without_a_parent_are_not_counted(self) -> None:
        policy, head = FirstComeFirstServed(), waiting_request(0)
        policy.order([head, returning_child(1)], 0.0)
        for number in range(2, 2 + policy.max_passes):
            policy.admitted(waiting_request(number), 0.0)
        self.pass_head(policy, head, policy.max_passes, first=200)


class TestVictim:
    def test_the_newest_gives_way_wherever_it_stands(self) -> None:
        running = [waiting_request(number) for number in (3, 7, 1)]
        assert FirstComeFirstServed().victim(running, None, 9.0) is running[1]

    def test_of_those_that_arrived_together_the_later_one(self) -> None:
        running = [waiting_request(number) for number in (5, 4, 6)]
        for request in running:
            request.arrival = 2.0
        assert FirstComeFirstServed().victim(running, None, 9.0) is running[2]

    def test_a_prompt_that_is_partly_computed_goes_before_any_of_them(self) -> None:
        oldest = waiting_request(0)
        assert FirstComeFirstServed().victim([waiting_request(8)], oldest, 9.0) is oldest


class TestPriority:
    def test_a_higher_one_goes_first_and_arrival_settles_ties(self) -> None:
        waiting = [
            waiting_request(0),
            waiting_request(1, priority=5),
            waiting_request(2),
            waiting_request(3, priority=5),
        ]
        order = FirstComeFirstServed().order(waiting, 0.0)
        assert [request.serial for request in order] == [1, 3, 0, 2]

    def test_children_with_a_lease_pass_equals_only(self) -> None:
        waiting = [waiting_request(0, priority=5), waiting_request(1), returning_child(2)]
        order = FirstComeFirstServed().order(waiting, 0.0)
        assert [request.serial for request in order] == [0, 2, 1]

    def test_the_lowest_is_retracted_first(self) -> None:
        policy = FirstComeFirstServed()
        running = [waiting_request(0, priority=-1), waiting_request(1), waiting_request(2, priority=3)]
        assert policy.victim(running, None, 9.0) is running[0]
        assert policy.victim(running, waiting_request(3, priority=1), 9.0) is running[0]
        lowest = waiting_request(4, priority=-1)
        assert policy.victim(running, lowest, 9.0) is lowest
        assert policy.victim(running[1:], None, 9.0) is running[1]


class TestLeases:
    def test_granted_before_claimed_by_deadline_and_the_youngest_claim_first(self) -> None:
        policy = FirstComeFirstServed()
        order = [
            granted_lease(5, 10.0),
            granted_lease(0, 11.0),
            granted_lease(3, 1e9),
            claimed_lease(9, 1.0),
            claimed_lease(2, 90.0),
            claimed_lease(1, 3.0),
        ]
        for seed in range(5):
            mixed = list(order)
            random.Random(seed).shuffle(mixed)
            assert sorted(mixed, key=lambda lease: policy.lease_value(lease, 0.0)) == order

    def test_values_agree_with_the_order_in_which_a_table_breaks(self) -> None:
        rig, policy, rng = CacheRig(), FirstComeFirstServed(), random.Random(3)
        leases = LeaseTable(rig.cache, max_tokens=1024, max_leases=8, value=policy.lease_value)
        for i in range(8):
            running = rig.start(np.arange(100 * i, 100 * i + 10, dtype=np.int32))
            assert rig.compute(running)
            lease = leases.grant(running.kv, rng.random() * 50)
            assert lease is not None and (i % 3 or leases.claim(lease, 0.0))
        while live := leases.live():
            least = min(live, key=lambda lease: policy.lease_value(lease, 1.0))
            leases.break_one(1.0)
            assert least.state is LeaseState.BROKEN

    def test_none_breaks_for_a_newcomer_while_others_run(self) -> None:
        policy = FirstComeFirstServed()
        assert not policy.may_break_for(waiting_request(0), granted_lease(0, 1.0), 5.0)
