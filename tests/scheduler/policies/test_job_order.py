"""Whose step goes first, and whose gives way, where jobs are known."""

from __future__ import annotations

import pytest

from baton.scheduler.policies.continuum import Continuum
from tests.doubles.job_scene import job, step_of, tools
from tests.doubles.policy_scene import returning_child, waiting_request


def test_the_job_that_came_first_goes_first() -> None:
    old, new = job(1.0), job(5.0)
    late, early, stranger = step_of(old, 9), step_of(new, 7), waiting_request(3)
    assert Continuum(tools()).order([stranger, early, late], 10.0) == [late, stranger, early]


def test_without_jobs_it_is_the_order_of_arrival() -> None:
    queue = [waiting_request(0), waiting_request(1)]
    assert Continuum(tools()).rank(queue, 9.0) is queue


def test_steps_of_one_job_keep_their_order() -> None:
    one = job(1.0)
    first, second = step_of(one, 4), step_of(one, 6)
    assert Continuum(tools()).order([first, second], 9.0) == [first, second]


def test_whoever_comes_back_for_a_pin_goes_before_older_jobs_but_not_for_ever() -> None:
    policy, old = Continuum(tools()), step_of(job(0.0), 1)
    for number in range(2, 2 + policy.max_passes):
        child = returning_child(number)
        assert policy.order([old, child], 9.0) == [child, old]
        assert child.inheritance is not None
        child.inheritance.lease = None
        policy.admitted(child, 9.0)
    last = returning_child(500)
    assert policy.order([old, last], 9.0) == [old, last]


def test_a_stranger_that_old_jobs_pass_again_and_again_gets_its_turn() -> None:
    policy, stranger, old = Continuum(tools()), waiting_request(0), job(-1.0)
    for number in range(1, 1 + policy.max_overtakes):
        step = step_of(old, number)
        assert policy.order([stranger, step], 9.0) == [step, stranger]
        policy.admitted(step, 9.0)
    step = step_of(old, 9999)
    assert policy.order([stranger, step], 9.0) == [stranger, step]


def test_the_newest_job_gives_way_unless_it_is_in_its_last_step() -> None:
    policy = Continuum(tools())
    oldest, middle, newest = job(0.0), job(3.0), job(6.0)
    first, second = step_of(oldest, 9), step_of(middle, 8)
    last = step_of(newest, 7, is_last=True)
    assert policy.victim([first, second, last], None, 9.0) is second
    assert policy.victim([first, last], None, 9.0) is last, "the oldest is spared"
    assert policy.victim([first], step_of(newest, 11), 9.0).serial == 11, "what is being computed may give way too"
    assert policy.victim([last], None, 9.0) is last


def test_a_lower_priority_gives_way_first() -> None:
    policy = Continuum(tools())
    first, low, high = step_of(job(0.0), 1), step_of(job(2.0), 2, priority=-1), step_of(job(3.0), 3)
    assert policy.victim([first, low, high], None, 9.0) is low


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_nobody_retracts_each_other_in_turns(order: list[int]) -> None:
    """Whoever runs, the oldest job is never the victim while others are."""
    steps = [step_of(job(float(n)), 10 - n, is_last=n == 2) for n in range(3)]
    running = [steps[n] for n in order]
    while len(running) > 1:
        running.remove(Continuum(tools()).victim(running, None, 9.0))
    assert running == [steps[0]]
