"""The tables of requests: the live ones of each rid, and the waiting ones in order of arrival."""

from __future__ import annotations

import random

import pytest

from baton.scheduler.queues import LiveRequests, WaitingQueue
from baton.scheduler.request import Request
from tests.doubles.policy_scene import waiting_request


class TestLiveRequests:
    def test_rid_is_removed_with_its_last_sibling(self) -> None:
        live, pair, alone = LiveRequests(), [waiting_request(0), waiting_request(0)], [waiting_request(1)]
        first, second = pair
        live.add_siblings("r0", pair)
        live.add_siblings("r1", alone)
        assert len(live) == 2 and live.rids == ["r0", "r1"] and list(live) == [first, second, *alone]
        live.remove_request(first)
        assert "r0" in live and live.siblings_of("r0") == [second]
        live.remove_request(second)
        assert "r0" not in live and live.siblings_of("r0") == [] and live.rids == ["r1"]

    def test_rids_before_returns_only_earlier_arrivals(self) -> None:
        live = LiveRequests()
        for number in range(4):
            live.add_siblings(f"r{number}", [waiting_request(number)])  # arrives after so many seconds
        assert [len(live.rids_before(arrival)) for arrival in (0.0, 0.5, 1.0, 3.5)] == [0, 1, 1, 4]
        assert live.rids_before(2.0) == ["r0", "r1"]


class TestWaitingQueue:
    @pytest.mark.parametrize("waiting", [1, 15, 16, 17, 40])
    @pytest.mark.parametrize("coming", [0, 1, 2])
    def test_retracted_request_returns_to_its_old_position(self, waiting: int, coming: int) -> None:
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

    def test_removing_request_not_in_queue_is_an_error(self) -> None:
        queue = WaitingQueue()
        queue.add_requests([waiting_request(0), waiting_request(2)])
        with pytest.raises(AssertionError):
            queue.remove_request(waiting_request(0))
        assert len(queue) == 2

    def test_several_requests_are_removed_at_once(self) -> None:
        queue = WaitingQueue()
        every = [waiting_request(number) for number in range(5)]
        queue.add_requests(every)
        queue.remove_requests([])
        assert queue.requests == every
        queue.remove_requests([every[1], every[4]])
        assert [request.serial for request in queue.requests] == [0, 2, 3]

    @pytest.mark.parametrize("seed", range(20))
    def test_waiting_queue_is_always_in_arrival_order(self, seed: int) -> None:
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
