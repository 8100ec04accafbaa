"""The policy `auto`: older jobs first, but only until a request has waited for longer than most do. T_fill is 10 s
here."""

from __future__ import annotations

import pytest

from baton.scheduler.policies.auto import LEAST_PATIENCE, MAX_RANKED, RECENT, Auto
from baton.scheduler.policies.job_policies import Handoff
from tests.doubles.job_scene import job, step_of, tools
from tests.doubles.policy_scene import FILL_TIME, returning_child, waiting_request


def auto(mean_wait_s: float = 0.0) -> Auto:
    """A policy whose recent requests have waited this long."""
    policy = Auto(tools())
    if mean_wait_s:
        for _ in range(RECENT):
            policy.note_admission(waiting_request(0), mean_wait_s)
    return policy


def test_without_jobs_the_order_is_by_arrival() -> None:
    queue = [waiting_request(0), waiting_request(1)]
    assert Auto(tools()).rank(queue, 9.0) is queue


@pytest.mark.parametrize("now", [6.0, 14.9, 15.1, 40.0])
def test_older_jobs_overtake_until_a_request_has_waited_for_long(now: float) -> None:
    """Requests wait for 10 s on average; the stranger has waited since 5 s, the step of the older job arrives now."""
    policy = auto(mean_wait_s=10.0)
    assert policy.patience_s == 10.0
    stranger, step = waiting_request(5), step_of(job(0.0), int(now))
    overtakes = now - 5.0 <= 10.0
    assert policy.order([stranger, step], now) == ([step, stranger] if overtakes else [stranger, step])
    assert Handoff(tools()).order([stranger, step], now) == [step, stranger]


def test_requests_that_waited_for_long_go_by_arrival_then_jobs_by_age() -> None:
    old, older, young = job(4.0), job(0.0), job(50.0)
    queue = [step_of(old, 10), step_of(older, 11), waiting_request(12), step_of(young, 58), step_of(old, 59)]
    late_stranger = waiting_request(57)
    queue.insert(3, late_stranger)
    assert auto(mean_wait_s=10.0).order(queue, 60.0) == [*queue[:3], queue[5], queue[4], late_stranger]


def test_patience_follows_recent_waits_and_has_a_floor() -> None:
    policy = auto(mean_wait_s=100.0)
    assert policy.patience_s == 100.0
    for _ in range(RECENT // 2):
        policy.note_admission(waiting_request(0), 20.0)
    assert policy.patience_s == 60.0
    for _ in range(RECENT):
        policy.note_admission(waiting_request(0), 0.0)
    assert policy.patience_s == LEAST_PATIENCE * FILL_TIME.seconds == Auto(tools()).patience_s == 5.0


def test_retracted_requests_and_clocks_that_step_back_do_not_count_as_waits() -> None:
    policy, retracted, early = Auto(tools()), waiting_request(0), waiting_request(50)
    retracted.retractions = 1
    policy.note_admission(retracted, 1000.0)
    policy.note_admission(early, 40.0)
    assert policy.patience_s == 5.0


def test_auto_bounds_overtaking_like_every_policy() -> None:
    policy, stranger, old = auto(mean_wait_s=1e6), waiting_request(0), job(-1.0)
    for number in range(1, 1 + policy.max_overtakes):
        step = step_of(old, number)
        assert policy.order([stranger, step], 9.0) == [step, stranger]
        policy.note_admission(step, 1e6)
    step = step_of(old, 9999)
    assert policy.order([stranger, step], 9.0) == [stranger, step]


def test_priority_is_before_patience() -> None:
    waited, urgent = waiting_request(0), waiting_request(29, priority=1)
    old = step_of(job(-5.0), 30)
    assert Auto(tools()).order([waited, urgent, old], 30.0) == [urgent, waited, old]


def test_pinned_steps_are_first() -> None:
    stranger, old, child = waiting_request(29), step_of(job(0.0), 30), returning_child(31)
    assert Auto(tools()).order([stranger, old, child], 31.0) == [child, old, stranger]


def test_only_the_front_of_a_long_queue_is_ranked() -> None:
    queue = [waiting_request(0) for _ in range(MAX_RANKED - 1)]
    inside, outside = step_of(job(-1.0), 1), step_of(job(-2.0), 2)
    order = Auto(tools()).rank([*queue, inside, outside], 2.0)
    assert order[0] is inside and order[-1] is outside
    assert len(order) == len({id(request) for request in order}) == MAX_RANKED + 1
