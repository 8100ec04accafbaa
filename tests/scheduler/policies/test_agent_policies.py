"""For how long each policy for agents keeps a step, and what breaks first."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.jobs.kept_turn import KeptTurn, Worth
from baton.scheduler.policies.context_serve import FAST_S, ContextServe
from baton.scheduler.policies.continuum import Continuum
from baton.scheduler.policies.handoff import Handoff
from baton.scheduler.policies.pin_times import MAX_PIN_S
from baton.scheduler.policies.registry import PINNING, POLICIES, make_policy
from baton.scheduler.policies.tools import PinTime, PolicyTools
from tests.doubles.job_scene import finished, job, tools
from tests.doubles.policy_scene import claimed_lease, fcfs, granted_lease, waiting_request


def knowing(**more: Any) -> PolicyTools:
    """``quick`` takes 0.2 s, ``crawl`` 60 s."""
    found = tools(**more)
    for _ in range(40):
        found.times.observe((ToolCall("quick"),), 0.2)
        found.times.observe((ToolCall("crawl"),), 60.0)
    return found


@pytest.mark.parametrize("policy", [Continuum, ContextServe, Handoff])
def test_before_its_calls_are_read_a_step_is_kept_for_a_moment(policy: type[Continuum]) -> None:
    assert policy(tools(provisional_s=0.7)).ttl(finished(read=False), 100.0) == 0.7


def test_fcfs_pins_nothing() -> None:
    policy = fcfs()
    assert policy.ttl(finished("ls"), 100.0) == policy.ttl(finished(read=False), 100.0) == 0.0


def test_continuum_pins_for_a_fixed_time_what_is_not_known_to_take_longer() -> None:
    policy = Continuum(knowing(pin_seconds=3.0))
    assert [policy.ttl(finished(tool), 100.0) for tool in ("quick", "crawl", "new")] == [3.0, 0.0, 3.0]


def test_context_serve_goes_by_the_command() -> None:
    policy = ContextServe(knowing())
    commands = ("ls -l", "make all", "./run", "quick", "crawl")
    assert [policy.ttl(finished(command), 100.0) for command in commands] == [FAST_S, 0.0, 2.0, FAST_S, 0.0]


def test_handoff_keeps_what_may_come_back_in_time_to_be_worth_it() -> None:
    policy = Handoff(knowing())
    assert 0.2 < policy.ttl(finished("quick"), 100.0) < 3.0  # a little longer than ever, too
    assert policy.ttl(finished("crawl"), 100.0) == 0.0
    assert Handoff(tools()).ttl(finished("new"), 100.0) == 2.0, "without a history it is a fixed time"
    assert policy.ttl(finished("quick", has_copy=True), 100.0) == 0.0, "the host has it"
    assert policy.ttl(finished(read=False, has_copy=True), 100.0) == 0.0


@pytest.mark.parametrize("rule", [rule for rule in get_args(PinTime) if rule != "auto"])
def test_every_rule_tells_quick_from_slow(rule: PinTime) -> None:
    for policy in (Continuum, Handoff):
        asked = policy(knowing(pin_time=rule))
        assert 0 < asked.ttl(finished("quick"), 100.0) <= 2.5
        assert asked.ttl(finished("crawl"), 100.0) == 0.0


def test_no_pin_is_without_end() -> None:
    forever = tools(pin_seconds=1e9)
    assert Continuum(forever).ttl(finished("new"), 100.0) == MAX_PIN_S


def test_handoff_breaks_the_newest_job_first_and_what_is_claimed_last() -> None:
    """Of jobs that are expected back; those that are not go by how long they have been idle."""
    policy = Handoff(tools())
    old, new, asked, late, later, claimed = (granted_lease(n, idle_since=50.0 + n) for n in range(6))
    claimed = claimed_lease(5)
    for lease, arrival, until in ((old, 1.0, 99.0), (new, 40.0, 99.0), (late, 0.5, 98.0), (later, 0.2, 98.0)):
        lease.owner = KeptTurn(Worth.ASKED_FOR, job(arrival), until)
    claimed.owner = KeptTurn(Worth.FIRST_TURN)
    leases = [claimed, old, later, asked, late, new]
    by_value = sorted(leases, key=lambda lease: policy.lease_value(lease, 99.0))
    assert by_value == [asked, late, later, new, old, claimed]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_breaks_first_turns_first_and_what_was_returned_to_last(name: str) -> None:
    """However long each has been idle, and however old its job is; the longest idle of equal worth goes first."""
    policy = make_policy(name, tools())
    leases = [granted_lease(n, idle_since=50.0 - n) for n in range(6)]
    for lease, worth in zip(leases, (0, 0, 1, 1, 2, 2)):
        lease.owner = KeptTurn(Worth(worth), job(float(lease.serial)))
    by_value = sorted(leases, key=lambda lease: policy.lease_value(lease, 99.0))
    assert [lease.serial for lease in by_value] == [1, 0, 3, 2, 5, 4]


@pytest.mark.parametrize("name", POLICIES)
def test_newcomers_need_not_wait_for_first_turns(name: str) -> None:
    policy = make_policy(name, tools())
    newcomer = waiting_request(7)
    young, old = granted_lease(0, idle_since=95.0), granted_lease(1, idle_since=80.0)
    for worth in Worth:
        young.owner = old.owner = KeptTurn(worth)
        assert policy.may_break_for(newcomer, young, 99.0) == (worth is Worth.FIRST_TURN)
        assert policy.may_break_for(newcomer, old, 99.0)
    claimed = claimed_lease(2, idle_since=80.0)
    claimed.owner = KeptTurn(Worth.FIRST_TURN)
    assert not policy.may_break_for(newcomer, claimed, 99.0)


@pytest.mark.parametrize("name", POLICIES)
def test_a_lease_that_outlasts_its_pin_holds_nobody_up(name: str) -> None:
    """Policies that say how long a tool is worth waiting for mean it, whoever asked for more."""
    policy = make_policy(name, tools())
    lease = granted_lease(0, idle_since=95.0)
    lease.owner = KeptTurn(Worth.RETURNED, job(1.0), expected_until=97.0)
    assert not policy.may_break_for(waiting_request(7), lease, 97.0)
    assert policy.may_break_for(waiting_request(7), lease, 97.5) == (name in PINNING)


def test_only_handoff_retires_what_is_done() -> None:
    assert Handoff(tools()).retires_jobs
    assert not Continuum(tools()).retires_jobs and not fcfs().retires_jobs
