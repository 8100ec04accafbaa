"""Describes a job to operators and clients: plain data for JSON. Times are seconds from now."""

from __future__ import annotations

from typing import Any

from .job import FinishedStep, Job


def describe(job: Job, now: float, predicted: float | None) -> dict[str, Any]:
    """predicted: seconds that its tool is expected to run after the last step; None if unknown."""
    pinned = job.pinned_steps()
    last = None if job.is_over else job.last_step  # a job that is over does not return from its tools
    returns = None if predicted is None or job.ended is None or job.is_over else max(0.0, job.ended + predicted - now)
    return {
        "job_id": job.id,
        "age_s": now - job.arrival,
        "turns": job.turns,
        "open_requests": list(job.open_rids),
        "is_over": job.is_over,
        "pinned_tokens": sum(step.tokens for step in pinned),
        "pins": [_pin(step, now) for step in pinned],
        "last_calls": [call.tool for call in last.calls] if last is not None and last.calls is not None else None,
        "returns_in_s": returns,
        "prompt_tokens": job.prompt_tokens,
        "hit_tokens": job.hit_tokens,
    }


def _pin(step: FinishedStep, now: float) -> dict[str, Any]:
    lease = step.lease
    assert lease is not None
    claimed = lease.claims > 0
    return {
        "rid": step.rid,
        "index": step.index,
        "tokens": step.tokens,
        "expires_in_s": None if claimed else max(0.0, lease.deadline - now),
        "is_claimed": claimed,
    }
