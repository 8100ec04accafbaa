"""What a watcher hears of requests, leases and jobs: plain data, as it crosses the wire. Times are seconds since the
worker started, durations seconds."""

from __future__ import annotations

from typing import Literal

import msgspec

PhaseKind = Literal["queued", "loading", "prefill", "decode", "retracted", "leased"]

Phase = tuple[PhaseKind, float, float | None, int]
"""What, from when, until when (None: it goes on), and how many tokens: of the prompt that waits or was retracted, of a
chunk, decoded so far, kept under a lease."""

MAX_PHASES = 64
"""Of one life; chunks that followed each other are told as one if there are more."""


class Life(msgspec.Struct, omit_defaults=True):
    """One sequence, from its arrival to the end of the leases on its KV."""

    rid: str
    index: int
    arrival: float
    prompt: int
    cached: int
    output: int
    phases: list[Phase]
    """In order; of one that had begun when the watching did, only what came then."""
    job_id: str | None = None
    parent: str | None = None
    """The rid that it continues."""
    child: str | None = None
    """The rid that took its KV over."""
    path: Literal["handoff", "fork", "match", "fallback"] | None = None
    end: Literal["stop", "length", "abort", "error"] | None = None


class RunningNow(msgspec.Struct, omit_defaults=True):
    rid: str
    phase: Literal["prefill", "decode", "beam"]
    computed: int
    """Tokens whose KV is computed and whose step has ended."""
    total: int
    """Tokens that are known."""
    output: int
    job_id: str | None = None


class WaitingNow(msgspec.Struct, omit_defaults=True):
    rid: str
    phase: Literal["queued", "loading", "parent"]
    total: int
    waited: float
    job_id: str | None = None


class LeaseNow(msgspec.Struct):
    serial: int
    rid: str | None
    job_id: str | None
    tokens: int
    idle: float
    expires_in: float | None
    claimed: bool


class JobNow(msgspec.Struct):
    job_id: str
    state: Literal["running", "away", "over"]
    """A request of it is open; none is, its tools run; its last step has ended."""
    steps: int
    pinned: int
    """Tokens."""
    expires_in: float | None
    """The first of its pins that has a deadline."""


class LoadNow(msgspec.Struct):
    """Tokens, but for the first two. From ``queries`` on: since start."""

    running: int
    waiting: int
    total: int
    free: int
    evictable: int
    protected: int
    private: int
    leased: int
    quarantined: int
    host_used: int
    host_total: int
    queries: int
    hits: int
    evicted: int
    prompt_tokens: int
    """Computed."""
    output_tokens: int
