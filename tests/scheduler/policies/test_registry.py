"""A policy is a class and a line in the registry; the scheduler asks it for all that it decides."""

from __future__ import annotations

import pytest

from baton.entrypoints.server_args import build_parser, compose, parse_command_line
from baton.entrypoints.server_config import UsageError
from baton.radix.lease import Lease
from baton.scheduler.policies.registry import POLICIES
from baton.scheduler.policies.request_policies import FirstComeFirstServed
from baton.scheduler.request import Request, RequestStatus
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.policy_scene import FILL_TIME
from tests.doubles.scheduler_harness import Harness


class Mine(FirstComeFirstServed):
    """Last come, first served; the oldest gives way; the lease that would expire last breaks first."""

    breaks_leases = True

    def __init__(self) -> None:
        super().__init__(FILL_TIME)
        self.times: list[float] = []

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        self.times.append(now)
        return waiting[::-1]

    def victim(self, running, prefilling, now: float) -> Request:
        self.times.append(now)
        return running[0]

    def lease_value(self, lease: Lease, now: float) -> tuple[float, ...]:
        self.times.append(now)
        return 0, -lease.deadline

    def may_break_for(self, request: Request, lease: Lease, now: float) -> bool:
        self.times.append(now)
        return self.breaks_leases


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Mine:
    policy = Mine()
    monkeypatch.setitem(POLICIES, "mine", lambda tools: policy)
    return policy


def request_of(harness: Harness, rid: str) -> Request:
    request = harness.outcomes[rid, 0].request
    assert request is not None
    return request


def test_schedule_policy_choices_are_the_registry() -> None:
    assert f"{{{','.join(POLICIES)}}}" in "".join(build_parser().format_help().split())
    for name in POLICIES:
        args = parse_command_line(["--model-path", "m", "--schedule-policy", name])
        assert args.scheduler.schedule_policy == name
    with pytest.raises(UsageError, match=f"'no such policy'; use one of {', '.join(POLICIES)}"):
        compose({"model_path": "m", "schedule_policy": "no such policy"})


def test_policy_orders_the_queue(mine: Mine) -> None:
    harness = Harness(policy="mine", rows=1)
    for rid in ("first", "second", "third"):
        harness.add(rid, prompt_of(20, len(rid)), 2)
    harness.step()
    statuses = [request_of(harness, rid).status for rid in ("first", "second", "third")]
    assert statuses == [RequestStatus.WAITING, RequestStatus.WAITING, RequestStatus.RUNNING]
    harness.run()


def test_policy_picks_the_victim(mine: Mine) -> None:
    harness = Harness(policy="mine", num_tokens=100, rows=2)
    harness.scheduler._reserve._ratio = 0.0  # so that both are admitted
    harness.add("a", prompt_of(30, 1), 40)
    harness.step()
    harness.add("b", prompt_of(30, 2), 30)
    while not any(request_of(harness, rid).retractions for rid in "ab"):
        harness.step()
    assert [request_of(harness, rid).retractions for rid in "ab"] == [1, 0]
    harness.run()
    assert harness.outcomes["a", 0].tokens == expected_output(prompt_of(30, 1), 40)


def pool_of_leases(policy: str) -> Harness:
    """Two leases of 100 tokens in a pool of 256, one that expires soon and one late; a small request runs."""
    harness = Harness(policy=policy, num_tokens=256, leased_ratio=1.0)
    harness.add("soon", prompt_of(100, 1), 1, retain_ttl=1e5)
    harness.add("late", prompt_of(99, 2), 1, retain_ttl=1e6)
    harness.run()
    harness.add("small", prompt_of(5, 3), 20)
    harness.step()
    return harness


def test_policy_decides_for_which_requests_leases_break(mine: Mine) -> None:
    harness = pool_of_leases("mine")
    harness.add("large", prompt_of(60, 4), 2)
    harness.step()
    assert request_of(harness, "large").kv is not None
    assert harness.scheduler.stats().leases_broken == 1
    harness.run()


@pytest.mark.parametrize("policy", ["fcfs", "mine"])
def test_idle_scheduler_breaks_leases_regardless_of_policy(mine: Mine, policy: str) -> None:
    mine.breaks_leases = False
    harness = pool_of_leases(policy)
    harness.add("large", prompt_of(60, 4), 2)
    harness.step()
    assert request_of(harness, "large").kv is None and harness.scheduler.stats().leases_broken == 0
    harness.run()
    assert harness.outcomes["large", 0].tokens == expected_output(prompt_of(60, 4), 2)
    assert harness.scheduler.stats().leases_broken == 1


@pytest.mark.parametrize(("limit", "is_admitted"), [(3, True), (2, False)])
def test_policy_max_deferred_limits_requests_waiting_for_prefix(mine: Mine, limit: int, is_admitted: bool) -> None:
    mine.max_deferred = limit
    harness = Harness(policy="mine", num_tokens=1024)
    harness.add("behind", prompt_of(20, 5), 2)
    for number in range(3):  # `Mine` takes the last first; these two wait for its prompt
        harness.add(f"same{number}", prompt_of(50), 2)
    harness.step()
    assert (request_of(harness, "behind").kv is not None) is is_admitted
    harness.run()


@pytest.mark.parametrize(("least", "computed"), [(40, 50 + 1), (51, 100)])
def test_policy_min_shared_tokens_decides_waiting_for_prefix(mine: Mine, least: int, computed: int) -> None:
    mine.min_shared_tokens = least
    harness = Harness(policy="mine", chunk=200)
    harness.add("a", prompt_of(50), 1)
    harness.add("b", prompt_of(50), 1)
    harness.run()
    assert harness.model.computed_tokens == computed


def test_policy_calls_get_the_time_of_the_turn(mine: Mine) -> None:
    harness = pool_of_leases("mine")
    harness.add("large", prompt_of(60, 4), 2)
    mine.times.clear()
    harness.step()
    assert len(mine.times) >= 3 and set(mine.times) == {harness.now}
    harness.run()
