"""The queue keeps the order of arrival, however requests come and go."""

from __future__ import annotations

import random

import pytest
from policy_scene import waiting_request

from baton.scheduler.queue.waiting import WaitingQueue


@pytest.mark.parametrize("waiting", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("coming", [0, 1, 2])
def test_a_retracted_request_comes_back_to_its_old_place(waiting: int, coming: int) -> None:
    queue = WaitingQueue()
    every = [waiting_request(number) for number in range(waiting + coming)]
    gone = random.Random(waiting + coming).sample(every, coming)
    queue.add(every)
    for request in gone:
        queue.remove(request)
        assert request not in queue.requests
    assert len(queue) == waiting
    queue.add(gone)
    assert queue.requests == every and len(queue) == waiting + coming


def test_only_one_that_waits_can_be_removed() -> None:
    queue = WaitingQueue()
    queue.add([waiting_request(0), waiting_request(2)])
    with pytest.raises(AssertionError):
        queue.remove(waiting_request(0))
    assert len(queue) == 2


def test_several_are_removed_at_once() -> None:
    queue = WaitingQueue()
    every = [waiting_request(number) for number in range(5)]
    queue.add(every)
    queue.remove_all([])
    assert queue.requests == every
    queue.remove_all(request for request in every if request.serial in (1, 4))
    assert [request.serial for request in queue.requests] == [0, 2, 3]
