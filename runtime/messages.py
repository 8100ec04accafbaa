"""Everything that crosses a socket: frozen, tagged msgspec structs, encoded as msgpack. Token ids are packed int32.

    TokenizerManager ──RequestSpec, AbortRequest, ControlRequest, …──▶ worker
    worker ──TokenOutputs, RequestError, ControlReply, SchedulerStats──▶ detokenizer
    detokenizer ──the same, with text──▶ TokenizerManager

Every rid that was sent gets exactly one end: an output with ``finish`` set for each of its n samples, or one
RequestError.
"""

from __future__ import annotations

import msgspec

from ..scheduler.jobs.calls import ToolCall
from ..scheduler.live_view.reports import JobNow, LeaseNow, Life, LoadNow, RunningNow, WaitingNow
from ..scheduler.outcome import NO_DRAFTS, CacheReport, ContextOverflow, DraftCounts, FinishReason, FoundTokens
from ..scheduler.request_spec import RequestSpec
from ..scheduler.stats import SchedulerStats


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of all messages; the tag is the class name."""


class ReleaseRequest(Message, frozen=True):
    """Give up the leases of a finished request; answered by a ControlReply with the payload true if it had any."""

    call_id: int
    rid: str


class StepCalls(Message, frozen=True):
    """The tool calls in the text of a job's finished step; sent before its client gets the last output."""

    rid: str
    index: int = 0
    calls: tuple[ToolCall, ...] = ()


class PrepareTurn(Message, frozen=True):
    """The prompt that follows a job's finished step will begin with these tokens, packed int32: compute them in idle
    time. Sent after the step's end; not answered."""

    rid: str
    index: int = 0
    ids: bytes = b""


class EndJob(Message, frozen=True):
    """End a job: abort its open requests and release its KV. Answered by a ControlReply; its payload says what was
    released, or is null if the job is not known."""

    call_id: int
    namespace: str
    job_id: str


class DescribeJobs(Message, frozen=True):
    """Describe the jobs of a namespace (None: of all) with ids that begin with ``prefix``, or the one of ``job_id``;
    answered by a ControlReply with a list. See scheduler/jobs/job.py."""

    call_id: int
    namespace: str | None
    prefix: str = ""
    job_id: str | None = None


class DescribeLeases(Message, frozen=True):
    """Describe a page of the live leases; answered by a ControlReply. client: only leases that count in its budget;
    None for all. See scheduler/continuation/records.py."""

    call_id: int
    after: int
    limit: int
    client: str | None = None


class WatchRequests(Message, frozen=True):
    """Report on requests, leases and jobs for ``seconds`` from now on; a client that keeps watching sends it again."""

    seconds: float


class WalkTree(Message, frozen=True):
    """Report the contents of the cache's tree in TreeRows. Requests made during a walk share it. with_heads: with the
    first token ids of each node."""

    with_heads: bool = False


class LoadItemTrie(Message, frozen=True):
    """Store a trie under a name; requests that use an earlier one of that name keep it. Answered by a ControlReply.

    edges: int64 bytes. All fields but the first two are those of scheduler.constraints.item_trie.ItemTrie.
    """

    call_id: int
    name: str
    edges: bytes
    num_items: int
    min_depth: int
    max_depth: int
    max_token: int


class DeleteItemTrie(Message, frozen=True):
    """Delete a trie. Answered by a ControlReply with the payload true if there was one."""

    call_id: int
    name: str


class LoadAdapter(Message, frozen=True):
    """Load the adapter in the folder ``path`` and name it; answered by a ControlReply, with a list of all adapters."""

    call_id: int
    name: str
    path: str


class UnloadAdapter(Message, frozen=True):
    """Take a name from its adapter; requests that use it continue. Answered by a ControlReply, with a list of the other
    adapters."""

    call_id: int
    name: str


class AbortRequest(Message, frozen=True):
    """End a request, or all of them when ``rid`` is None."""

    rid: str | None = None


class ControlRequest(Message, frozen=True):
    """A question to the worker, answered by a ControlReply with the same call_id. verb: flush_cache | info |
    tiers | statistics | reset_statistics | item_tries | start_profile | stop_profile."""

    call_id: int
    verb: str


class LogprobChunk(Message, frozen=True):
    """Logprobs of consecutive tokens. ids and values run in parallel; top_* hold k entries per token, flattened;
    named_values one for each of the ids that the request names.

    All values are float32 bytes; NaN stands for "none" (the first prompt token has no logprob). ranks: int32 bytes, one
    for each token, 1 for the likeliest; empty where they are not wanted.
    """

    ids: bytes
    values: bytes
    top_ids: bytes = b""
    top_values: bytes = b""
    ranks: bytes = b""
    named_values: bytes = b""


class DetokenizeParams(Message, frozen=True):
    """The settings of a request that the detokenizer needs; sent with its first output."""

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stop: tuple[str, ...] = ()
    no_stop_trim: bool = False
    stream: bool = False


class ContinuationOutput(Message, frozen=True):
    """The tokens that a continuation took over from its parent, and the path; see scheduler.request.Inheritance."""

    path: str
    inherited_tokens: int
    recomputed_tokens: int
    trimmed_tokens: int


class RetainedOutput(Message, frozen=True):
    """The outcome of retain_ttl: ``tokens`` are kept for ``ttl`` seconds, or ``refused`` says why not, and ``tier``
    which tier has ``tokens`` nevertheless. See scheduler.outcome.Retained."""

    tokens: int = 0
    ttl: float = 0.0
    refused: str | None = None
    tier: str | None = None


class BeamOutput(Message, frozen=True):
    """The scores of one result of a beam search; the outputs of a search are numbered best first.

    num_results: how many outputs the search has. shortfall: why there are fewer than n; None if there are n.
    """

    sequence_score: float
    cumulative_logprob: float
    num_results: int
    shortfall: str | None = None


class TokenOutput(Message, frozen=True):
    """New tokens of one sample. The last one of a sample carries ``finish``."""

    rid: str
    index: int = 0
    new_ids: bytes = b""
    prompt_tokens: int = 0
    found: FoundTokens = FoundTokens()
    completion_tokens: int = 0
    finish: FinishReason | None = None
    params: DetokenizeParams | None = None
    prompt_ids: bytes = b""
    """Packed int32; sent with a sample's first output if its spec has ``returns_prompt``."""
    input_logprobs: LogprobChunk | None = None
    output_logprobs: LogprobChunk | None = None
    continuation: ContinuationOutput | None = None
    """Sent with the last output, like ``retained``."""
    retained: RetainedOutput | None = None
    drafts: DraftCounts = NO_DRAFTS
    """Sent with the last output, too."""
    cache_report: CacheReport | None = None
    """Likewise. Names in it are the worker's."""
    beam: BeamOutput | None = None
    prepared_tokens: int = 0
    """Tokens among those found that were prepared in idle time."""
    vector: bytes = b""
    """float32, sent with the last output of a prompt that is pooled."""
    is_job_step: bool = False
    """Sent with the last output: it is a step of a job, whether or not its spec names one."""


class TokenOutputs(Message, frozen=True):
    """All outputs of one step."""

    items: list[TokenOutput]


class TextOutput(Message, frozen=True):
    """A TokenOutput with its text. ``text`` is new since the last one, in whole characters."""

    output: TokenOutput
    text: str = ""


class TextOutputs(Message, frozen=True):
    items: list[TextOutput]


class RequestError(Message, frozen=True):
    """Ends a request that was refused or failed, with all its samples. Its fields are those of RequestRefused."""

    rid: str
    message: str
    code: str = "invalid_request"
    param: str | None = None
    overflow: ContextOverflow | None = None


class ControlReply(Message, frozen=True):
    """payload: JSON bytes."""

    call_id: int
    ok: bool = True
    payload: bytes = b"null"


class WatchReport(Message, frozen=True):
    """A part of a report; fields that this part lacks are None. t: seconds since the worker started."""

    t: float
    load: LoadNow | None = None
    running: list[RunningNow] | None = None
    waiting: list[WaitingNow] | None = None
    leases: list[LeaseNow] | None = None
    num_leases: int = 0
    jobs: list[JobNow] | None = None
    num_jobs: int = 0
    lives: list[Life] = []
    """The lives that have changed."""
    is_first: bool = False
    """True in the first report after the worker began to record."""
    is_last: bool = False
    """True for the last part of a report."""


class WalkEnd(Message, frozen=True):
    """A walk is over. began, ended: seconds since the worker started. ticks, seconds: when the cache's ticks were, as
    `TickTimes` packs them, by the clock that showed ``ended_at`` at the end."""

    began: float
    ended: float
    complete: bool
    ticks: bytes
    seconds: bytes
    ended_at: float


class TreeRows(Message, frozen=True):
    """The next nodes of a walk; see radix/snapshot.py."""

    is_first: bool
    rows: bytes
    heads: bytes = b""
    names: tuple[str, ...] = ()
    end: WalkEnd | None = None


class StartPhase(Message, frozen=True):
    """What a worker does that cannot serve yet, in words that follow "the server is starting: "."""

    phase: str


class WorkerReady(Message, frozen=True):
    """A worker's first message after its `StartPhase`s: it is warm and serves this. info: JSON bytes (pool size,
    context, limits)."""

    info: bytes


ToWorker = (
    RequestSpec
    | AbortRequest
    | ReleaseRequest
    | StepCalls
    | PrepareTurn
    | EndJob
    | DescribeJobs
    | DescribeLeases
    | WatchRequests
    | WalkTree
    | ControlRequest
    | LoadItemTrie
    | DeleteItemTrie
    | LoadAdapter
    | UnloadAdapter
)
Watched = WatchReport | TreeRows
FromWorker = TokenOutputs | RequestError | ControlReply | SchedulerStats | StartPhase | WorkerReady | Watched
ToManager = TextOutputs | RequestError | ControlReply | SchedulerStats | StartPhase | WorkerReady | Watched
