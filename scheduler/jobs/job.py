"""A job: an agent's requests, one after the other, with tools that run between them. Plain data; see job_table.py."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ...radix.lease import Lease
from ...radix.node import TreeNode
from .calls import ToolCall, shown_name
from .returns import TurnKind

MAX_STEPS = 8
"""The last finished steps of a job, which its next request may continue."""


@dataclass(slots=True, eq=False)
class Job:
    """Requests that name the same ``id`` in the same namespace. Times are of the scheduler's clock."""

    namespace: str
    id: str
    arrival: float
    """Arrival of its first request, or of its parent's; jobs are ordered by it."""
    serial: int
    """Serial of that request; breaks ties."""
    heard: float
    """Time of its last activity: an arrival, an end, or a report of its calls."""
    client: str = ""
    """Client of its first request."""
    open_rids: dict[str, int] = field(default_factory=dict)
    """Number of open sequences of each request that has not ended, by rid."""
    steps: deque[FinishedStep] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    """Latest last."""
    ended: float | None = None
    """When its last request ended; None before that, and again once its next request has arrived."""
    turns: int = 0
    """Requests that ended well."""
    returns: int = 0
    """How often it sent a new request after all earlier ones had ended."""
    is_over: bool = False
    """Its last step has ended."""
    is_unasked: bool = False
    """The client of its first request named no job and asked for no lease."""
    called_tools: bool = False
    """One of its steps called a tool."""
    counted_as: TurnKind | None = None
    """The kind as which its last turn has counted as not continued; None as long as it has not."""
    shared_tokens: int | None = None
    """Tokens that its first request found in the cache: others computed them and may use them too. None until that
    request has ended."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    """Prompt tokens that were found in the cache."""
    began: float = field(init=False)
    """Arrival of its first request."""
    asked: tuple[float, int] = field(init=False)
    """Arrival and serial of the request that its present work began with: the first, or the first after an answer
    without a tool call, since which its user has written again. Of a child, the parent's, if that is earlier."""
    parent: Job | None = None
    """The job that started this one and waits for it; see family.py."""
    adopted: dict[Job, None] = field(default_factory=dict)
    """All known jobs that have this one as their parent."""
    children: dict[Job, None] = field(default_factory=dict)
    """Those of them that computed something, or were expected back, when last looked at; the last active last."""
    held_until: float = -math.inf
    """Until when its pins are held for its children."""

    def __post_init__(self) -> None:
        self.began = self.arrival
        self.asked = self.arrival, self.serial

    @property
    def last_step(self) -> FinishedStep | None:
        return self.steps[-1] if self.steps else None

    @property
    def turn_kind(self) -> TurnKind | None:
        """The kind of its last turn while it is the user who may write again, if ever; None at other times."""
        last = self.last_step
        if self.is_over or last is None or last.calls != ():
            return None
        if self.called_tools:
            return TurnKind.ANSWER
        if self.returns:
            return TurnKind.TALK
        return TurnKind.OPENING if self.is_unasked else TurnKind.NAMED

    def pinned_steps(self) -> list[FinishedStep]:
        """The finished steps that have a live lease."""
        return [step for step in self.steps if step.is_pinned]

    def __repr__(self) -> str:
        return f"Job({self.id!r} turns={self.turns} open={len(self.open_rids)} pinned={len(self.pinned_steps())})"


@dataclass(slots=True, eq=False)
class FinishedStep:
    """A job's sequence that ended successfully, and the lease on its KV, if there is one: a pin."""

    job: Job
    rid: str
    index: int
    ended: float
    tokens: int
    """Tokens under the lease when it was granted; 0 without a lease."""
    namespace: str = ""
    """Namespace of its KV; see `Request.namespace`."""
    adapter: str = ""
    """Key of the adapter that computed it."""
    lease: Lease | None = None
    is_refused: bool = False
    """Its KV was to be kept, but the lease was refused."""
    is_asked: bool = False
    """The client itself asked for the lease (retain_ttl)."""
    node: TreeNode | None = None
    """The end of its KV in the tree if the lease was refused; None once its job is overdue, or known to be over."""
    asked_until: float = 0.0
    """Deadline that the client requested with retain_ttl; a policy may extend it, but never shortens it."""
    own_until: float = -math.inf
    """Deadline of the lease without the job's children."""
    expected_until: float = -math.inf
    """As `KeptTurn.expected_until`, without the job's children."""
    has_copy: bool = False
    """A tier below the device has its KV, or will have it before the KV leaves the device; set once its calls are
    known."""
    calls: tuple[ToolCall, ...] | None = None
    """The tools it called; None until its text has been parsed."""

    @property
    def is_pinned(self) -> bool:
        return self.lease is not None and self.lease.is_live


def describe_job(job: Job, now: float, predicted: float | None) -> dict[str, Any]:
    """predicted: seconds that its tool is expected to run after the last step; None if unknown."""
    pinned = job.pinned_steps()
    last = None if job.is_over else job.last_step  # a job that is over does not return from its tools
    returns = None if predicted is None or job.ended is None or job.is_over else max(0.0, job.ended + predicted - now)
    return {
        "job_id": job.id,
        "parent_job_id": job.parent.id if job.parent is not None else None,
        "age_s": now - job.began,
        "turns": job.turns,
        "open_requests": list(job.open_rids),
        "is_over": job.is_over,
        "pinned_tokens": sum(step.tokens for step in pinned),
        "pins": [_describe_pin(step, now) for step in pinned],
        "waits_for": shown_name(last.calls) if last is not None and last.calls is not None else None,
        "last_calls": [call.tool for call in last.calls] if last is not None and last.calls is not None else None,
        "returns_in_s": returns,
        "prompt_tokens": job.prompt_tokens,
        "hit_tokens": job.hit_tokens,
    }


def _describe_pin(step: FinishedStep, now: float) -> dict[str, Any]:
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
