"""The queue keeps the order of arrival, however requests come and go."""

from __future__ import annotations

import random

import pytest

from baton.scheduler.queue.waiting import WaitingQueue
from baton.scheduler.request import Request
from tests.doubles.policy_scene import waiting_request


@pytest.mark.parametrize("waiting", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("coming", [0, 1, 2])
def test_a_retracted_request_comes_back_to_its_old_place(waiting: int, coming: int) -> None:
    queue = WaitingQueue()
    every = [waiting_request(number) for number in range(waiting + coming)]
    gone = random.Random(waiting + coming).sample(every, coming)
    queue.add_requests(every)
    for request in gone:
        queue.remove_request(request)
        assert request not in queue.requests
    assert len(queue) == waiting
    queue.add_requests(gone)
    assert queue.requests == every and len(queue) == waiting + coming


def test_only_one_that_waits_can_be_removed() -> None:
    queue = WaitingQueue()
    queue.add_requests([waiting_request(0), waiting_request(2)])
    with pytest.raises(AssertionError):
        queue.remove_request(waiting_request(0))
    assert len(queue) == 2


def test_several_are_removed_at_once() -> None:
    queue = WaitingQueue()
    every = [waiting_request(number) for number in range(5)]
    queue.add_requests(every)
    queue.remove_requests([])
    assert queue.requests == every
    queue.remove_requests([every[1], every[4]])
    assert [request.serial for request in queue.requests] == [0, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_always_in_order_of_arrival(seed: int) -> None:
    rng = random.Random(seed)
    queue, oracle = WaitingQueue(), list[Request]()
    away: list[Request] = []
    arrived = 0
    for _ in range(200):
        match rng.randrange(4):
            case 0 | 1:  # one, or a whole family, that has just arrived
                new = [waiting_request(arrived + i) for i in range(rng.choice([1, 1, 1, 2, 40]))]
                arrived += len(new)
                if rng.random() < 0.5:
                    away += new
                else:
                    queue.add_requests(new)
                    oracle += new
            case 2 if oracle:
                gone = rng.choice(oracle)
                queue.remove_request(gone)
                oracle.remove(gone)
                away.append(gone)
            case 3:  # retracted requests, and children whose parent has ended
                back = [away.pop(rng.randrange(len(away))) for _ in range(min(len(away), rng.choice([1, 2, 30])))]
                queue.add_requests(back)
                oracle += back
            case _:
                gone = rng.sample(oracle, len(oracle) // 3)
                queue.remove_requests(gone)
                oracle = [request for request in oracle if request not in gone]
        assert queue.requests == sorted(oracle, key=lambda request: request.serial)
        assert len(queue) == len(oracle)
