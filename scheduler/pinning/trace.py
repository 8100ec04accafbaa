"""The events of jobs, one plain dict each, for whoever writes them down (``--scheduler-trace``) or replays them."""

from __future__ import annotations

from typing import Any

from ..jobs.job import FinishedStep, Job
from ..request import Request

MAX_EVENTS = 100_000
"""Kept until somebody takes them; later ones are dropped, and counted."""


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
        """A request of a job has been taken in. (Of a continuation of a running parent the prompt is not known.)"""
        if self.enabled:
            prompt = {"prompt_tokens": request.prompt_len, "is_last_step": request.spec.is_last_step}
            self._add("arrival", job, now, rid=request.rid, turn=job.turns + 1, **prompt)

    def returned(self, job: Job, now: float) -> None:
        """The job's next request is there; its tool took this long."""
        step = job.last_step
        if self.enabled and job.ended is not None and step is not None:
            names = [call.tool for call in step.calls] if step.calls is not None else None
            self._add("returned", job, now, tools=names, seconds=now - job.ended)

    def departed(self, job: Job, request: Request, now: float) -> None:
        """A sequence has ended."""
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
        """What a step called is known."""
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
