"""The policies for agents: order of the steps, retraction, and how long each step stays pinned."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.jobs.kept_turn import KeptTurn, Worth
from baton.scheduler.policies.auto import Auto
from baton.scheduler.policies.job_policies import FAST_S, MAX_PIN_S, ContextServe, Continuum, Handoff, JobOrder
from baton.scheduler.policies.policy import PinTime, PolicyTools
from baton.scheduler.policies.registry import PINNING, POLICIES, make_policy
from tests.doubles.job_scene import finished, job, step_of, tools
from tests.doubles.policy_scene import claimed_lease, fcfs, granted_lease, returning_child, waiting_request


class TestJobOrder:
    def test_oldest_job_is_ordered_first(self) -> None:
        old, new = job(1.0), job(5.0)
        late, early, stranger = step_of(old, 9), step_of(new, 7), waiting_request(3)
        assert Continuum(tools()).order([stranger, early, late], 10.0) == [late, stranger, early]

    def test_job_order_without_jobs_is_arrival_order(self) -> None:
        queue = [waiting_request(0), waiting_request(1)]
        assert Continuum(tools()).rank(queue, 9.0) is queue

    def test_steps_of_one_job_keep_their_order(self) -> None:
        one = job(1.0)
        first, second = step_of(one, 4), step_of(one, 6)
        assert Continuum(tools()).order([first, second], 9.0) == [first, second]

    def test_pinned_children_pass_older_jobs_up_to_max_passes(self) -> None:
        policy, old = Continuum(tools()), step_of(job(0.0), 1)
        for number in range(2, 2 + policy.max_passes):
            child = returning_child(number)
            assert policy.order([old, child], 9.0) == [child, old]
            assert child.inheritance is not None
            child.inheritance.lease = None
            policy.note_admission(child, 9.0)
        last = returning_child(500)
        assert policy.order([old, last], 9.0) == [old, last]

    def test_old_jobs_do_not_starve_other_requests(self) -> None:
        policy, stranger, old = Continuum(tools()), waiting_request(0), job(-1.0)
        for number in range(1, 1 + policy.max_overtakes):
            step = step_of(old, number)
            assert policy.order([stranger, step], 9.0) == [step, stranger]
            policy.note_admission(step, 9.0)
        step = step_of(old, 9999)
        assert policy.order([stranger, step], 9.0) == [stranger, step]

    @pytest.mark.parametrize("kind", [Continuum, Handoff, Auto])
    def test_newest_job_is_victim_unless_in_last_step(self, kind: type[JobOrder]) -> None:
        policy = kind(tools())
        oldest, middle, newest = job(0.0), job(3.0), job(6.0)
        first, second = step_of(oldest, 9), step_of(middle, 8)
        last = step_of(newest, 7, is_last=True)
        assert policy.victim([first, second, last], None, 9.0) is second
        assert policy.victim([first, last], None, 9.0) is last, "the oldest is spared"
        assert policy.victim([first], step_of(newest, 11), 9.0).serial == 11, "what is being computed may give way too"
        assert policy.victim([last], None, 9.0) is last

    def test_lower_priority_is_victim_before_newer_job(self) -> None:
        policy = Continuum(tools())
        first, low, high = step_of(job(0.0), 1), step_of(job(2.0), 2, priority=-1), step_of(job(3.0), 3)
        assert policy.victim([first, low, high], None, 9.0) is low

    @pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
    def test_oldest_job_is_never_the_victim(self, order: list[int]) -> None:
        """Whoever runs, the oldest job is never the victim while others are."""
        steps = [step_of(job(float(n)), 10 - n, is_last=n == 2) for n in range(3)]
        running = [steps[n] for n in order]
        while len(running) > 1:
            running.remove(Continuum(tools()).victim(running, None, 9.0))
        assert running == [steps[0]]


def knowing(**more: Any) -> PolicyTools:
    """``quick`` takes 0.2 s, ``crawl`` 60 s."""
    found = tools(**more)
    for _ in range(40):
        found.times.record_duration((ToolCall("quick"),), 0.2)
        found.times.record_duration((ToolCall("crawl"),), 60.0)
    return found


class TestPins:
    @pytest.mark.parametrize("policy", [Continuum, ContextServe, Handoff, Auto])
    def test_step_with_unread_calls_is_pinned_provisionally(self, policy: type[JobOrder]) -> None:
        assert policy(tools(provisional_s=0.7)).ttl(finished(read=False), 100.0) == 0.7

    def test_fcfs_pins_nothing(self) -> None:
        policy = fcfs()
        assert policy.ttl(finished("ls"), 100.0) == policy.ttl(finished(read=False), 100.0) == 0.0

    def test_continuum_pins_for_fixed_time_unless_tool_is_slow(self) -> None:
        policy = Continuum(knowing(pin_seconds=3.0))
        assert [policy.ttl(finished(tool), 100.0) for tool in ("quick", "crawl", "new")] == [3.0, 0.0, 3.0]

    def test_context_serve_ttl_depends_on_command(self) -> None:
        policy = ContextServe(knowing())
        commands = ("ls -l", "make all", "./run", "quick", "crawl")
        assert [policy.ttl(finished(command), 100.0) for command in commands] == [FAST_S, 0.0, 2.0, FAST_S, 0.0]

    @pytest.mark.parametrize("kind", [Handoff, Auto])
    def test_handoff_pins_only_steps_expected_back_in_time(self, kind: type[Handoff]) -> None:
        policy = kind(knowing())
        assert 0.2 < policy.ttl(finished("quick"), 100.0) < 3.0  # a little longer than ever, too
        assert policy.ttl(finished("crawl"), 100.0) == 0.0
        assert kind(tools()).ttl(finished(), 100.0) == 2.0, "without a history of the user it is a fixed time"
        assert policy.ttl(finished("quick", has_copy=True), 100.0) == 0.0, "the host has it"
        assert policy.ttl(finished(read=False, has_copy=True), 100.0) == 0.0

    @pytest.mark.parametrize("kind", [Handoff, Auto])
    def test_handoff_pins_for_fill_time_while_little_is_known(self, kind: type[Handoff]) -> None:
        """T_fill is 10 s."""
        few = tools()
        policy = kind(few)
        assert policy.ttl(finished("new"), 100.0) == 10.0
        for _ in range(7):
            few.times.record_duration((ToolCall("quick"),), 0.1)
        assert policy.ttl(finished("quick"), 100.0) == policy.ttl(finished("new"), 100.0) == 10.0
        few.times.record_duration((ToolCall("quick"),), 0.1)
        assert policy.ttl(finished("quick"), 100.0) < 3.0 and policy.ttl(finished("new"), 100.0) == 0.1
        few.times.record_duration((ToolCall("slow"),), 30.0)
        assert policy.ttl(finished("slow"), 100.0) < 10.0, "it has never returned in time"
        few.times.record_duration((ToolCall("slow"),), 9.0)
        assert policy.ttl(finished("slow"), 100.0) >= 10.0

    @pytest.mark.parametrize("rule", [rule for rule in get_args(PinTime) if rule != "auto"])
    def test_every_pin_time_rule_separates_quick_and_slow_tools(self, rule: PinTime) -> None:
        for policy in (Continuum, Handoff):
            asked = policy(knowing(pin_time=rule))
            assert 0 < asked.ttl(finished("quick"), 100.0) <= 2.5
            assert asked.ttl(finished("crawl"), 100.0) == 0.0

    def test_pin_time_is_capped(self) -> None:
        forever = tools(pin_seconds=1e9)
        assert Continuum(forever).ttl(finished("new"), 100.0) == MAX_PIN_S

    @pytest.mark.parametrize("kind", [Handoff, Auto])
    def test_handoff_breaks_newest_job_first_and_claimed_leases_last(self, kind: type[Handoff]) -> None:
        """For jobs that are expected back. Leases of other jobs break in order of their idle time."""
        policy = kind(tools())
        old, new, asked, late, later, claimed = (granted_lease(n, idle_since=50.0 + n) for n in range(6))
        claimed = claimed_lease(5)
        for lease, arrival, until in ((old, 1.0, 99.0), (new, 40.0, 99.0), (late, 0.5, 98.0), (later, 0.2, 98.0)):
            lease.owner = KeptTurn(Worth.ASKED_FOR, job(arrival), until)
        claimed.owner = KeptTurn(Worth.FIRST_TURN)
        leases = [claimed, old, later, asked, late, new]
        by_value = sorted(leases, key=lambda lease: policy.lease_value(lease, 99.0))
        assert by_value == [asked, late, later, new, old, claimed]

    @pytest.mark.parametrize("name", POLICIES)
    def test_every_policy_breaks_first_turns_first_and_returned_last(self, name: str) -> None:
        """However long each has been idle, and however old its job is; the longest idle of equal worth goes first."""
        policy = make_policy(name, tools())
        leases = [granted_lease(n, idle_since=50.0 - n) for n in range(6)]
        for lease, worth in zip(leases, (0, 0, 1, 1, 2, 2)):
            lease.owner = KeptTurn(Worth(worth), job(float(lease.serial)))
        by_value = sorted(leases, key=lambda lease: policy.lease_value(lease, 99.0))
        assert [lease.serial for lease in by_value] == [1, 0, 3, 2, 5, 4]

    @pytest.mark.parametrize("name", POLICIES)
    def test_leases_of_first_turns_break_for_newcomers(self, name: str) -> None:
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
    def test_lease_outlasting_its_pin_breaks_for_newcomers(self, name: str) -> None:
        """Policies that say how long a tool is worth waiting for mean it, whoever asked for more."""
        policy = make_policy(name, tools())
        lease = granted_lease(0, idle_since=95.0)
        lease.owner = KeptTurn(Worth.RETURNED, job(1.0), expected_until=97.0)
        assert not policy.may_break_for(waiting_request(7), lease, 97.0)
        assert policy.may_break_for(waiting_request(7), lease, 97.5) == (name in PINNING)

    def test_only_handoff_and_auto_retire_finished_jobs(self) -> None:
        assert Handoff(tools()).retires_jobs and Auto(tools()).retires_jobs
        assert not Continuum(tools()).retires_jobs and not fcfs().retires_jobs
