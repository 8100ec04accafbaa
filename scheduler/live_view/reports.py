"""Reports of requests, leases and jobs to a watcher: plain data that crosses the wire. Times are seconds since the
worker started, durations seconds."""

from __future__ import annotations

from typing import Literal

import msgspec

PhaseKind = Literal["queued", "loading", "prefill", "decode", "retracted", "leased"]

Phase = tuple[PhaseKind, float, float | None, int]
"""(kind, begin, end, tokens). end: None while the phase lasts. tokens: of the waiting or retracted prompt, of a chunk,
decoded so far, or under a lease."""

Miss = tuple[str, int, int, float | None, str | None]
"""Prompt tokens that were not found in the cache: (reason, position of the first, tokens, seconds since the last of
them left it, the request that needed the memory). See `MissedSpan`."""

MAX_MISSES = 16
"""Misses kept of one life, the first ones."""

MAX_PHASES = 64
"""Phases kept of one life; beyond that, two consecutive ones of one kind are merged or, failing that, the second is
dropped."""


class Life(msgspec.Struct, omit_defaults=True):
    """One sequence, from its arrival to the end of the leases on its KV."""

    rid: str
    index: int
    arrival: float
    prompt: int
    cached: int
    output: int
    phases: list[Phase]
    """In order; of a request that was live before watching began, only those since then."""
    job_id: str | None = None
    parent: str | None = None
    """Rid of the request that it continues."""
    child: str | None = None
    """Rid of the request that took over its KV."""
    path: Literal["handoff", "fork", "match", "fallback"] | None = None
    end: Literal["stop", "length", "abort", "error"] | None = None
    missed: list[Miss] = []
    """Set at the first admission."""


class RunningNow(msgspec.Struct, omit_defaults=True):
    rid: str
    phase: Literal["prefill", "decode", "beam"]
    computed: int
    """Tokens with computed KV, as of the last step that has ended."""
    total: int
    """Known tokens: prompt and output."""
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
    """running: a request of it is open. away: none is open, and its tools run. over: its last step has ended."""
    steps: int
    pinned: int
    """Tokens under its pins."""
    expires_in: float | None
    """Seconds until the earliest deadline among its pins; None if there is none."""


class LoadNow(msgspec.Struct):
    """Counts of tokens, except ``running`` and ``waiting``, which count requests, and states, which count states. From
    ``queries`` to ``output_tokens``, and where it is evicted: totals since start."""

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
    """Computed prompt tokens."""
    output_tokens: int
    states_total: int = 0
    """Recurrent states, see `StateStats`; 0, like all that follow, for models without."""
    states_free: int = 0
    states_held: int = 0
    states_cached: int = 0
    states_kept: int = 0
    states_evicted: int = 0
    host_states_total: int = 0
    host_states_used: int = 0
    host_states_evicted: int = 0
    window_total: int = 0
    """The pool for sliding windows, see `WindowPoolStats`."""
    window_free: int = 0
    window_evictable: int = 0
    window_evicted: int = 0
