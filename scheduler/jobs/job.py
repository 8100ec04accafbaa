"""A job: an agent's requests, one after the other, with tools that run between them. Plain data; see job_table.py."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ...radix.lease import Lease
from .calls import ToolCall

MAX_STEPS = 8
"""Finished steps that a job can go on from: its last ones."""


@dataclass(slots=True, eq=False)
class Job:
    """Requests that name the same ``id`` in the same namespace. Times are of the scheduler's clock."""

    namespace: str
    id: str
    arrival: float
    """Of its first request: what the order of jobs goes by."""
    serial: int
    """Of its first request; breaks ties."""
    heard: float
    """When it was last here: an arrival, an end, a call."""
    client: str = ""
    """Of its first request."""
    open_rids: dict[str, int] = field(default_factory=dict)
    """Requests that have not ended, with their number of sequences."""
    steps: deque[FinishedStep] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    """The latest last."""
    ended: float | None = None
    """When its last request ended; None before that, and once the time until its next request is known."""
    turns: int = 0
    """Requests that ended well."""
    returns: int = 0
    """How often it came back after all its requests had ended."""
    is_over: bool = False
    """Its last step has ended."""
    shared_tokens: int | None = None
    """What its first request found in the cache: computed by others, and theirs as well. None until it has ended."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Of its prompts' tokens, found in the cache."""

    @property
    def last_step(self) -> FinishedStep | None:
        return self.steps[-1] if self.steps else None

    def pinned_steps(self) -> list[FinishedStep]:
        """Those whose lease lives."""
        return [step for step in self.steps if step.is_pinned]

    def __repr__(self) -> str:
        return f"Job({self.id!r} turns={self.turns} open={len(self.open_rids)} pinned={len(self.pinned_steps())})"


@dataclass(slots=True, eq=False)
class FinishedStep:
    """A sequence of a job that ended well, and the lease on its KV, if there is one: a pin."""

    job: Job
    rid: str
    index: int
    ended: float
    tokens: int
    """Under the lease when it was granted; 0 without one."""
    lease: Lease | None = None
    asked_until: float = 0.0
    """The deadline that the client asked for with retain_ttl; a policy goes beyond it, never below."""
    has_copy: bool = False
    """A tier below the device has its KV, or will before it leaves the device; known once its calls are."""
    calls: tuple[ToolCall, ...] | None = None
    """What it called; None until somebody has read its text."""

    @property
    def is_pinned(self) -> bool:
        return self.lease is not None and self.lease.is_live
