"""Records events of jobs, one plain dict each, for a log (``--scheduler-trace``) or a replay."""

from __future__ import annotations

from typing import Any

from ..jobs.job import FinishedStep, Job
from ..request import Request

MAX_EVENTS = 100_000
"""Events kept until `take_events` is called; later ones are dropped, and counted."""


class JobTrace:
    """Records nothing until it is switched on. Times are of the scheduler's clock, in seconds; lengths in tokens."""

    def __init__(self) -> None:
        self.enabled = False
        self._events: list[dict[str, Any]] = []
        self._dropped = 0

    def take_events(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        events, self._events = self._events, []
        if self._dropped:
            events.append({"event": "dropped", "events": self._dropped})
            self._dropped = 0
        return events

    def arrived(self, job: Job, request: Request, now: float) -> None:
        """Record a new request of a job. (Its prompt's length is not known if it continues a running parent.)"""
        if self.enabled:
            prompt = {"prompt_tokens": request.prompt_len, "is_last_step": request.spec.is_last_step}
            self._add("arrival", job, now, rid=request.rid, turn=job.turns + 1, **prompt)

    def returned(self, job: Job, now: float) -> None:
        """Record that the job's next request has arrived, and how long its tool took."""
        step = job.last_step
        if self.enabled and job.ended is not None and step is not None:
            names = [call.tool for call in step.calls] if step.calls is not None else None
            self._add("returned", job, now, tools=names, seconds=now - job.ended)

    def departed(self, job: Job, request: Request, now: float) -> None:
        """Record the end of a sequence."""
        if self.enabled:
            assert request.finish is not None
            self._add(
                "departure",
                job,
                now,
                rid=request.rid,
                index=request.index,
                reason=request.finish.type,
                prompt_tokens=request.prompt_len,
                hit_tokens=request.found.total,
                output_tokens=request.num_output_tokens,
                is_last_step=request.spec.is_last_step,
            )

    def called(self, step: FinishedStep, now: float) -> None:
        """Record the tools that a step called."""
        if self.enabled:
            calls = [{"tool": call.tool, "command": call.command} for call in step.calls or ()]
            self._add("called", step.job, now, rid=step.rid, index=step.index, calls=calls)

    def pinned(self, step: FinishedStep, ttl: float, now: float) -> None:
        if self.enabled:
            self._add("pinned", step.job, now, rid=step.rid, index=step.index, tokens=step.tokens, ttl=ttl)

    def unpinned(self, step: FinishedStep, reason: str, held: float, now: float) -> None:
        """reason: hits (the next step took it over), expired, broken, released. held: seconds."""
        if self.enabled:
            more = {"tokens": step.tokens, "reason": reason, "held": held}
            self._add("unpinned", step.job, now, rid=step.rid, index=step.index, **more)

    def _add(self, event: str, job: Job, now: float, **more: Any) -> None:
        if len(self._events) >= MAX_EVENTS:
            self._dropped += 1
            return
        self._events.append({"event": event, "time": now, "job_id": job.id, **more})
