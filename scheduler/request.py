"""The life of one sequence as the scheduler sees it. No text, no tensors, no clock.

    parked ──parent ends──▶ waiting ──admit──▶ prefilling ──last chunk──▶ running ──▶ finished
    loading ──disk───────────▶ ▲                                             │
                               └────────────────── retract ──────────────────┘

Only a continuation of a running parent is ever parked. Only a request that finds KV in a store is ever loading.

Lengths of a sequence, always committed_len <= scheduled_len <= len(token_ids) + num_output_placeholders:

    token_ids      |----- prompt -----|--- outputs already known ---|
    committed_len  |---------------------------------------|          KV written and its result processed
    scheduled_len  |---------------------------------------------|    KV written, or being written by a step in flight

Only committed tokens may enter the tree or a lease.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np

from ..radix.kv_sequence import KVSequence
from ..radix.lease import Lease, LeaseTerms
from ..radix.node import StateKind, TreeNode
from .beam.rows import BeamKV
from .beam.search import BeamGroup
from .constraints.constraint import Constraint, ConstraintState
from .jobs.job import Job
from .jobs.kept_turn import KeptTurn, Worth
from .outcome import NO_DRAFTS, CacheReport, FinishReason, FoundTokens, RequestRefused, Retained
from .request_spec import RequestSpec
from .token_buffer import TokenBuffer


class RequestStatus(Enum):
    PARKED = "parked"
    LOADING = "loading"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


ContinuationPath = Literal["handoff", "fork", "match", "tier", "fallback"]


@dataclass(slots=True)
class Inheritance:
    """A continuation's share of its parent's tokens and KV. path: see docs/design/continuation.md."""

    path: ContinuationPath
    inherited_tokens: int = 0
    """Prompt tokens that came from the parent."""
    trimmed_tokens: int = 0
    """Tokens of the parent's matched stop that were left out."""
    recomputed_tokens: int = 0
    """Inherited tokens without cached KV, which are computed again; set at the first admission."""
    lease: Lease | None = None
    """The lease it has claimed; None from admission on."""
    took_over: bool = False
    """True if the request was opened with the lease's KV or a copy of it, without a look-up in the tree."""
    keep_parent: bool = False
    parent: tuple[str, int] | None = None
    """Rid and index of the parent, where it is known."""
    copied: Lease | None = None
    """The lease that its first tokens' KV was copied from, where the parent is kept; set at admission."""

    def note_opened(self, took_over: bool) -> None:
        """Called at admission. A lease that is still claimed then broke, or another child took it over."""
        self.took_over = took_over
        if self.lease is not None:
            self.lease = None
            if self.path == "handoff":
                self.path = "match"

    def note_admitted(self, found: FoundTokens) -> None:
        """Called with the first step: the first tokens of the prompt need not be computed. A match that found none of
        them is no match: the prompt is computed as a whole."""
        self.recomputed_tokens = max(0, self.inherited_tokens - found.total)
        if self.path == "match" and self.inherited_tokens and not found.total:
            self.path = "fallback"
        elif self.path == "match" and found.below_device and found.device < self.inherited_tokens:
            self.path = "tier"


@dataclass(slots=True)
class Loading:
    """A request's reads from the stores behind the host: those under way and those made."""

    reads: int = 0
    asked: bool = False
    """True once a store has been asked what it has."""
    deadline: float = math.inf
    """When the request stops waiting and computes the missing part."""
    brought: dict[str, int] = field(default_factory=dict)
    """Tokens that came to the host, by store."""


class PreparedSpan(NamedTuple):
    """Tokens of a request's prompt that a preparation has computed (scheduler/preparations.py)."""

    start: int
    stop: int
    prepared: int
    """Tokens that were prepared in all; the prompt may share only the first of them."""
    scope: tuple[str, str]
    """Client and namespace, by which the benefit is learned."""


class Request:
    """One sequence. ``index`` numbers the samples of a request with n > 1."""

    __slots__ = (
        "adapter",
        "arrival",
        "asked_ttl",
        "awaits_constraint",
        "beam_kv",
        "beams",
        "cache_report",
        "committed_len",
        "constraint",
        "constraint_state",
        "cut_len",
        "diverged_at",
        "drafts",
        "expected_until",
        "finish",
        "found",
        "index",
        "inheritance",
        "is_open",
        "job",
        "job_id",
        "kv",
        "last_step",
        "loading",
        "logprob_next",
        "logprobs",
        "max_new_tokens",
        "namespace",
        "num_drafted",
        "num_output_placeholders",
        "own_ids",
        "prefix_node",
        "prepared",
        "prepared_tokens",
        "prompt_len",
        "queried",
        "retain_ttl",
        "retained",
        "retractions",
        "rid",
        "sampling",
        "scheduled_len",
        "seed",
        "serial",
        "spec",
        "state_points",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        spec: RequestSpec,
        *,
        index: int,
        seed: int,
        arrival: float,
        serial: int,
        own_ids: np.ndarray | None = None,
        constraint: Constraint | None = None,
        adapter: str = "",
        default_retain_ttl: float = 0.0,
        max_retain_ttl: float = math.inf,
    ) -> None:
        """own_ids: int32 [n], the request's own tokens; None for spec.token_ids. constraint, adapter: what the spec
        names."""
        self.spec = spec
        self.rid = spec.rid
        self.index = index
        self.adapter = adapter
        """Key of the adapter that computes it; empty for none. Its KV is of no use to any other."""
        self.namespace = f"{spec.namespace}\0{adapter}" if adapter else spec.namespace
        """The namespace of its KV: that of the spec, or a part of that for its adapter alone."""
        self.sampling = spec.sampling
        self.seed = seed
        self.arrival = arrival
        self.serial = serial
        """Order of arrival among all requests, which breaks ties of ``arrival``; names the sequence in steps."""
        self.logprobs = spec.logprobs
        self.retain_ttl = min(max_retain_ttl, default_retain_ttl if spec.retain_ttl is None else spec.retain_ttl)
        self.asked_ttl = self.retain_ttl
        """``retain_ttl`` before a policy extends it: what its client or the server's default asked for."""
        self.job_id = spec.job_id
        """The job that it is a step of: the one that the spec names, or that `PinManager.find_job` found."""
        self.job: Job | None = None  # of ``job_id``; set once the request has been taken in
        self.expected_until = -math.inf  # set at its end; see `KeptTurn`
        self.own_ids = spec.token_ids if own_ids is None else own_ids
        """int32: the prompt, or what follows the parent's tokens."""
        self.token_ids = TokenBuffer(self.own_ids)
        self.prompt_len = len(self.own_ids)
        self.max_new_tokens = 0
        """sampling.max_new_tokens, or what the context leaves when that is None."""
        self.logprob_next = 0
        """Next prompt position that still lacks a requested logprob; prompt_len when none does. Position 0 has none."""
        self.status = RequestStatus.PARKED
        self.inheritance: Inheritance | None = None
        """Set for a continuation once its parent's tokens are known."""
        self.retained: Retained | None = None
        """Set at the end if the spec asked for it."""
        self.is_open = False
        """True once a step has contained it, so that the step runner knows it."""
        self.kv: KVSequence | None = None
        self.committed_len = self.scheduled_len = self.num_output_placeholders = 0
        self.cut_len: int | None = None
        """Its length if a stop string ends it that may have begun; None if none may have."""
        self.num_drafted = 0  # guesses of a step in flight: counted in scheduled_len, and as placeholders
        self.drafts = NO_DRAFTS
        self.prefix_node: TreeNode | None = None
        """A node that its tokens match whole, found while it waits; the next look-up starts there."""
        self.state_points = dict.fromkeys(spec.state_points, StateKind.BRANCH)
        """Numbers of tokens after which the recurrent state is left for others; see state_memory.py."""
        self.found = FoundTokens()
        """Cached tokens that the first admission found, by tier."""
        self.cache_report: CacheReport | None = None
        """Why the rest of the prompt was not found; set with ``found``."""
        self.diverged_at: int | None = None  # see `CacheReport`; set with the prompt
        self.loading = Loading()
        self.queried = False  # True once what was found is counted; a retracted request is not counted again
        self.beams: BeamGroup | None = None
        """Set for a beam search once its prompt is known; the generated tokens are in there, not in token_ids."""
        self.beam_kv: BeamKV | None = None
        """The KV of the beams, once the prompt is computed; ``kv`` then holds only the prompt's whole pages."""
        self.constraint = constraint
        self.constraint_state: ConstraintState | None = constraint.start() if constraint is not None else None
        """State of the constraint after the generated tokens; a beam search keeps one for each of its beams instead."""
        self.awaits_constraint = False
        """Its constraint was still being made when the scheduler last asked."""
        self.retractions = self.last_step = 0  # last_step: that computed tokens of it
        self.finish: FinishReason | None = None
        self.prepared: PreparedSpan | None = None
        """Set from its arrival to its first admission, if its job's next prompt was prepared."""
        self.prepared_tokens = 0
        """Tokens among those found that a preparation had computed."""

    def set_prompt(self, prompt: TokenBuffer, max_new_tokens: int) -> None:
        """Set the prompt, now that it is known, and wait for admission."""
        self.token_ids = prompt
        self.prompt_len = len(prompt)
        self.max_new_tokens = max_new_tokens
        start_len = self.logprobs.start_len if self.logprobs is not None else -1
        self.logprob_next = max(1, start_len) if start_len >= 0 else self.prompt_len
        self.status = RequestStatus.WAITING

    def note_found(self, length: int, on_host: int) -> None:
        """Note that it is opened with KV of its first ``length`` tokens, ``on_host`` of them loaded from the host.
        Counts until its first step has been formed; what was loaded when it was opened in vain counts too."""
        if self.queried:
            return
        on_host = min(max(on_host, self.found.total - self.found.device), length)
        disk = min(on_host, self.loading.brought.get("disk", 0))
        remote = min(on_host - disk, self.loading.brought.get("remote", 0))
        self.found = FoundTokens(length - on_host, on_host - disk - remote, disk, remote)

    def commit(self, length: int) -> None:
        """Mark the first ``length`` tokens as committed: their KV is written and their step's result processed."""
        self.committed_len = length
        if self.logprob_next < self.prompt_len:
            self.logprob_next = max(self.logprob_next, min(length + 1, self.prompt_len))

    def fail(self, message: str) -> None:
        """End with an error, whatever state it is in. It drops all that it holds; the pools are recounted."""
        self.finish = FinishReason(type="abort", message=message)
        self.status = RequestStatus.FINISHED
        self.kv = self.beam_kv = None
        if self.inheritance is not None:
            self.inheritance.lease = None

    def requeue(self) -> None:
        """Wait for admission again, without KV, as if it had been retracted; after an exception."""
        self.status = RequestStatus.WAITING
        self.kv = self.beam_kv = None
        self.committed_len = self.scheduled_len = 0
        self.num_output_placeholders = self.num_drafted = 0
        if self.inheritance is not None and self.inheritance.path == "handoff" and not (self.has_claim or self.queried):
            self.inheritance.path = "match"  # its lease was lost on the way

    def rewind(self, scheduled_len: int, num_output_placeholders: int, num_drafted: int) -> None:
        """Count only what the steps in flight compute of it; after an exception. It must hold KV."""
        self.scheduled_len = scheduled_len
        self.num_output_placeholders = num_output_placeholders
        self.num_drafted = num_drafted
        self.held_kv.length = max(scheduled_len, self.held_kv.tree_len)

    def rewind_beams(self, num_steps: int) -> None:
        """As `rewind`, for a search with a computed prompt: ``num_steps`` steps in flight compute its beams."""
        self.num_output_placeholders = num_steps
        if not num_steps:
            self.held_beams.length = self.held_beams.committed

    @property
    def has_claim(self) -> bool:
        """True while a lease waits for this request's admission."""
        return self.inheritance is not None and self.inheritance.lease is not None and self.inheritance.lease.is_live

    @property
    def held_kv(self) -> KVSequence:
        """``kv`` of a request that is known to hold KV: prefilling or running."""
        assert self.kv is not None, f"{self} holds no KV"
        return self.kv

    @property
    def held_beams(self) -> BeamKV:
        """``beam_kv`` of a search with a computed prompt."""
        assert self.beam_kv is not None, f"{self} has no beams yet"
        return self.beam_kv

    @property
    def num_computed_beam_tokens(self) -> int:
        """Generated tokens of each beam that have KV, or get it from a step in flight."""
        return self.beam_kv.length - self.prompt_len if self.beam_kv is not None else 0

    @property
    def key(self) -> tuple[str, int]:
        return self.rid, self.index

    @property
    def prefix_limit(self) -> int:
        """Known tokens that may come from the cache: the last is always computed, and so is any that owes a logprob or
        a hidden state."""
        if self.spec.pooling is not None and self.spec.pooling.needs_first_tokens:
            return 0
        limit = len(self.token_ids) - 1
        return min(limit, self.logprob_next - 1) if self.logprob_next < self.prompt_len else limit

    @property
    def is_search(self) -> bool:
        """A beam search: one sequence here, up to n results."""
        return self.sampling.beam_width is not None

    @property
    def is_preparation(self) -> bool:
        """A chunk of a preparation, which is no request of a client."""
        return self.spec.prepares is not None

    @property
    def ends_at_eos(self) -> bool:
        """True if an eos token ends it: not where a constraint treats eos like any other token, nor with ignore_eos,
        unless a constraint has it at the end of whole outputs only."""
        constraint = self.constraint
        if constraint is None:
            return not self.sampling.ignore_eos
        return constraint.eos_ends and (constraint.must_complete or not self.sampling.ignore_eos)

    @property
    def num_retained(self) -> int:
        """Number of its sequences that stay leased at their end: the first ones, or the best of a search."""
        if self.retain_ttl <= 0:
            return 0
        n, retain_n = self.sampling.n, self.spec.retain_n
        return n if retain_n is None else min(retain_n, n)

    def lease_terms(self, now: float, *, awaited: bool = False) -> LeaseTerms:
        """The terms of its lease at its end. awaited: a parked request will continue it. Its job is not expected back
        before its calls are known: until then it breaks no lease of a job that is."""
        kept = KeptTurn(Worth.RETURNED if awaited else self.worth, self.job)
        return LeaseTerms(now + self.retain_ttl, now, self.spec.client, kept)

    @property
    def worth(self) -> Worth:
        """How likely it is to be continued once it has ended."""
        if self.inheritance is not None or (self.job is not None and self.job.returns):
            return Worth.RETURNED
        return Worth.FIRST_TURN if self.is_unasked else Worth.ASKED_FOR

    @property
    def is_unasked(self) -> bool:
        """True if its client named no job and asked for no lease: where it has them, they are the server's doing."""
        return self.spec.unasked or (self.job_id is not None and self.spec.job_id is None and not self.asked_ttl)

    @property
    def num_rows(self) -> int:
        """The most rows it takes in a decode step: one, or one for each beam of a search."""
        return self.sampling.num_rows

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known."""
        return len(self.token_ids) - self.prompt_len

    @property
    def output_ids(self) -> np.ndarray:
        """int32 view of the generated tokens."""
        return self.token_ids.view(self.prompt_len)

    def __repr__(self) -> str:
        return (
            f"Request({self.rid}#{self.index} {self.status.value} prompt={self.prompt_len} "
            f"out={self.num_output_tokens} committed={self.committed_len})"
        )


@dataclass(slots=True)
class RequestEvent:
    """News of one request for its client: new tokens, its end, or both.

    row: row of the batch that the tokens came from, -1 when there is none (abort). token_ids: the row's new tokens up
    to the one that ended the request.
    refusal: set if the request ended before it began, because its parent cannot be continued, or if its output is
    invalid; ``finish`` is set too.
    """

    request: Request
    row: int = -1
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    refusal: RequestRefused | None = None


class RequestFault(Exception):
    """Something failed while one request was handled, so only that request ends (recovery.py). ``__cause__`` is the
    exception."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"{request}")
        self.request = request
