"""The policy `auto`: older jobs first, but only until a request has waited for longer than any would have in order of
arrival. T_fill is 10 s here."""

from __future__ import annotations

import random

import pytest

from baton.scheduler.policies.auto import LEAST_PATIENCE, MAX_RANKED, RECENT, SLACK, Auto, LongestOfLast
from baton.scheduler.policies.job_policies import Handoff
from baton.scheduler.request import Request
from tests.doubles.job_scene import job, step_of, tools
from tests.doubles.policy_scene import FILL_TIME, returning_child, waiting_request


def auto(wait_s: float = 0.0) -> Auto:
    """A policy whose last request has waited this long."""
    policy = Auto(tools())
    if wait_s:
        admit(policy, waiting_request(0), wait_s)
    return policy


def admit(policy: Auto, request: Request, now: float, *others: Request) -> None:
    """Admit a request of those that wait: itself, and the others."""
    policy.order(sorted([request, *others], key=lambda each: each.serial), now)
    policy.note_admission(request, now)


def test_without_jobs_the_order_is_by_arrival() -> None:
    queue = [waiting_request(0), waiting_request(1)]
    assert Auto(tools()).rank(queue, 9.0) is queue


@pytest.mark.parametrize("now", [6.0, 14.9, 15.1, 40.0])
def test_older_jobs_overtake_until_a_request_has_waited_for_long(now: float) -> None:
    """Patience is 10 s; the stranger has waited since 5 s, the step of the older job arrives now."""
    policy = auto(10.0 / SLACK)
    assert policy.patience_s == pytest.approx(10.0)
    stranger, step = waiting_request(5), step_of(job(0.0), int(now))
    overtakes = now - 5.0 <= 10.0
    assert policy.order([stranger, step], now) == ([step, stranger] if overtakes else [stranger, step])
    assert Handoff(tools()).order([stranger, step], now) == [step, stranger]


def test_requests_that_waited_for_long_go_by_arrival_then_jobs_by_age() -> None:
    old, older, young = job(4.0), job(0.0), job(50.0)
    queue = [step_of(old, 10), step_of(older, 11), waiting_request(12), step_of(young, 58), step_of(old, 59)]
    late_stranger = waiting_request(57)
    queue.insert(3, late_stranger)
    assert auto(10.0 / SLACK).order(queue, 60.0) == [*queue[:3], queue[5], queue[4], late_stranger]


def test_patience_follows_recent_waits_and_has_a_floor() -> None:
    policy = auto(100.0)
    assert policy.patience_s == 100.0 * SLACK
    for number in range(1, RECENT):
        admit(policy, waiting_request(number), number + 20.0)
    assert policy.patience_s == 100.0 * SLACK, "the longest of the last ones"
    admit(policy, waiting_request(RECENT), RECENT + 20.0)
    assert policy.patience_s == 20.0 * SLACK
    for number in range(RECENT + 1, 2 * RECENT + 1):
        admit(policy, waiting_request(number), number)
    assert policy.patience_s == LEAST_PATIENCE * FILL_TIME.seconds == Auto(tools()).patience_s == 5.0


def test_waits_are_those_in_order_of_arrival() -> None:
    """The last to arrive is admitted first, and the first last; in order of arrival none would have waited so long."""
    policy = Auto(tools())
    first, second, third = waiting_request(0), waiting_request(10), waiting_request(20)
    admit(policy, third, 21.0, first, second)
    assert policy.patience_s == 21.0 * SLACK, "the first would have been admitted then"
    admit(policy, second, 28.0, first)
    admit(policy, first, 50.0)
    assert policy.patience_s == 30.0 * SLACK, "the third would have waited from 20 s to 50 s, none for 50 s"


def test_requests_that_end_in_the_queue_leave_no_wait() -> None:
    """Aborted ones; the next request comes an hour later, alone."""
    policy = Auto(tools())
    policy.order([waiting_request(0), waiting_request(1), waiting_request(2)], 3.0)
    admit(policy, waiting_request(3600), 3602.0)
    assert policy.patience_s == 5.0
    policy.order([waiting_request(3700), waiting_request(3701)], 3702.0)
    admit(policy, waiting_request(3703), 3704.0, waiting_request(3701))
    assert policy.patience_s == 3.0 * SLACK, "the one of 3701 s"


def test_retracted_requests_and_clocks_that_step_back_do_not_count_as_waits() -> None:
    policy, retracted = Auto(tools()), waiting_request(0)
    retracted.retractions = 1
    admit(policy, retracted, 1000.0)
    admit(policy, waiting_request(1050), 1040.0)
    assert policy.patience_s == 5.0


def test_longest_of_last_numbers() -> None:
    rng, longest, numbers = random.Random(5), LongestOfLast(4), [0.0]
    for _ in range(200):
        numbers.append(float(rng.randrange(20)))
        longest.add_number(numbers[-1])
        assert longest.longest == max(numbers[1:][-4:])


def test_user_who_has_written_again_comes_when_it_is_their_turn() -> None:
    """Not as the step of an old job: the answer before it has ended that work."""
    talk, agent = job(0.0), job(10.0)
    talk.asked = 30.0, 30
    again, stranger, step = step_of(talk, 30), waiting_request(20), step_of(agent, 31)
    queue = [stranger, again, step]
    assert auto(100.0).order(queue, 31.0) == [step, stranger, again]
    assert Handoff(tools()).order(queue, 31.0) == [again, step, stranger]


def test_victim_is_the_step_of_the_newest_work() -> None:
    talk, agent = job(0.0), job(10.0)
    talk.asked = 30.0, 30
    oldest, again, step = step_of(job(1.0), 1), step_of(talk, 30), step_of(agent, 31)
    assert auto().victim([oldest, again, step], None, 31.0) is again
    assert Handoff(tools()).victim([oldest, again, step], None, 31.0) is step


def test_auto_bounds_overtaking_like_every_policy() -> None:
    policy, stranger, old = auto(1e6), waiting_request(0), job(-1.0)
    for number in range(1, 1 + policy.max_overtakes):
        step = step_of(old, number)
        assert policy.order([stranger, step], 9.0) == [step, stranger]
        policy.note_admission(step, 9.0 if number % 100 else 1e6)
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
