"""The waiting queue stays in order of arrival, whoever comes back to it."""

from __future__ import annotations

import random

import pytest
from policy_scene import waiting_request

from baton.scheduler.queue.waiting import WaitingQueue
from baton.scheduler.request import Request


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
                    queue.add(new)
                    oracle += new
            case 2 if oracle:
                gone = rng.choice(oracle)
                queue.remove(gone)
                oracle.remove(gone)
                away.append(gone)
            case 3:  # retracted requests, and children whose parent has ended
                back = [away.pop(rng.randrange(len(away))) for _ in range(min(len(away), rng.choice([1, 2, 30])))]
                queue.add(back)
                oracle += back
            case _:
                gone = rng.sample(oracle, len(oracle) // 3)
                queue.remove_all(gone)
                oracle = [request for request in oracle if request not in gone]
        assert list(queue) == sorted(oracle, key=lambda request: request.serial)
        assert len(queue) == len(oracle)
