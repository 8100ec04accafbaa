"""A random order."""

from __future__ import annotations

from baton.scheduler.policies.random_order import RandomOrder
from baton.scheduler.request import Request
from tests.doubles.policy_scene import FILL_TIME, returning_child, waiting_request


def test_it_is_an_order_of_all_and_not_that_of_arrival() -> None:
    queue = [waiting_request(number) for number in range(100)]
    found = RandomOrder(FILL_TIME).order(queue, 0.0)
    assert found != queue and sorted(request.serial for request in found) == list(range(100))
    moved = sum(abs(place - request.serial) for place, request in enumerate(found)) / 100
    assert 20 < moved < 45, "a third of the queue on average"


def test_every_rank_and_every_turn_draws_the_same() -> None:
    queue = [waiting_request(number) for number in range(50)]
    policy = RandomOrder(FILL_TIME)
    found = policy.order(queue, 0.0)
    assert found == policy.order(queue, 7.0) == RandomOrder(FILL_TIME).order(list(queue), 3.0)
    gone = found[:10]
    rest = [request for request in queue if request not in gone]
    assert policy.order(rest, 8.0) == found[10:], "who waits on keeps a place among the others"


def test_priorities_and_leases_go_before() -> None:
    urgent, child = waiting_request(60, priority=1), returning_child(61)
    queue = [waiting_request(number) for number in range(20)]
    assert RandomOrder(FILL_TIME).order([*queue, urgent, child], 0.0)[:2] == [urgent, child]


def test_nobody_is_passed_for_ever() -> None:
    policy = RandomOrder(FILL_TIME)
    last = policy.order([waiting_request(number) for number in range(400)], 0.0)[-1]
    served: list[Request] = []
    while last not in served:
        newcomers = [waiting_request(1000 + 8 * len(served) + more) for more in range(8)]
        first = policy.order([last, *newcomers], 0.0)[0]
        policy.admitted(first, 0.0)
        served.append(first)
        assert len(served) <= policy.max_overtakes + 1
    assert len(served) > 50, "it did wait"
