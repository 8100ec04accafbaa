"""Requests of jobs, and finished steps, for the tests of policies for agents."""

from __future__ import annotations

from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.jobs.job import FinishedStep, Job
from baton.scheduler.policies.policy import PolicyTools
from baton.scheduler.request import Request
from baton.scheduler.request_spec import RequestSpec
from tests.doubles.cache_rig import CacheRig
from tests.doubles.policy_scene import FILL_TIME, waiting_request


def tools(**more) -> PolicyTools:
    """T_fill is 10 s."""
    return PolicyTools(CacheRig().cache, FILL_TIME, **more)


def job(arrival: float) -> Job:
    return Job("", f"job {arrival}", arrival, int(arrival), heard=arrival)


def step_of(owner: Job, number: int, *, is_last: bool = False, priority: int = 0) -> Request:
    """The ``number``-th request to arrive, a step of a job."""
    request = waiting_request(number, priority=priority)
    request.job = owner
    if is_last:
        request.spec = RequestSpec(rid=request.rid, sampling=request.sampling, priority=priority, is_last_step=True)
    return request


def finished(*commands: str, read: bool = True, has_copy: bool = False) -> FinishedStep:
    """A step that ended at 100 s. read: its calls are known."""
    calls = tuple(ToolCall(command.split()[0], command) for command in commands)
    return FinishedStep(job(0.0), "r", 0, 100.0, 50, has_copy=has_copy, calls=calls if read else None)
