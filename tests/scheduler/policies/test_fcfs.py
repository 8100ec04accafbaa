"""First come, first served."""

from __future__ import annotations

from tests.doubles.policy_scene import fcfs, waiting_request


def test_order_is_that_of_arrival() -> None:
    queue = [waiting_request(0, list(range(90))), waiting_request(1, [1]), waiting_request(2, list(range(50)))]
    assert fcfs().order(queue, 5.0) == queue
