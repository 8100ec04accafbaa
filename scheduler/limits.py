"""Limits: refuses at once what cannot be served (lengths, beams, a full queue), and sets the budget of leases."""

from __future__ import annotations

from collections.abc import Collection

from ..memory_pool.allocator import Allocator
from ..memory_pool.window_pages import WindowedAllocator
from ..radix.lease_budget import LeaseBudget
from .config import SchedulerConfig
from .constraints.constraint import Constraint
from .outcome import ContextOverflow, RequestRefused, context_exceeded
from .request import Request
from .request_spec import LogprobOptions, RequestSpec
from .sampling_params import SamplingParams


def check_lengths(request: Request, prompt_len: int, context: int, allocator: Allocator) -> int:
    """Return how many tokens a request may generate: max_new_tokens, or what context and pool leave if that is None;
    not more than the longest output that its constraint allows.

    Raises RequestRefused if the prompt, or prompt and output, can never fit, or if no such output is short enough.
    """
    wanted, constraint = request.sampling.max_new_tokens, request.constraint
    if prompt_len == 0:
        raise RequestRefused("the prompt is empty; send at least one token", param="input_ids")
    if prompt_len + (wanted != 0) > context:
        raise context_exceeded(ContextOverflow(context, prompt_len), "input_ids")
    if constraint is not None:
        if (refusal := output_too_short(constraint, wanted)) is not None:
            raise refusal
        if (longest := constraint.max_tokens) is not None:
            wanted = longest if wanted is None else min(wanted, longest)
    if wanted is not None and request.spec.clamps_output:
        wanted = min(wanted, context - prompt_len)
    if wanted is not None and prompt_len + wanted > context:
        raise context_exceeded(ContextOverflow(context, prompt_len, wanted), "max_new_tokens")
    room = _room(request, prompt_len, allocator)
    most = min(context - prompt_len, room + 1)  # the last token's KV is never computed
    if room < 0 or (wanted is not None and wanted > most):
        raise RequestRefused(
            _never_fits(request, prompt_len, wanted, allocator),
            code="kv_pool_exceeded",
            param="max_new_tokens",
        )
    return most if wanted is None else wanted


def output_too_short(constraint: Constraint, max_new_tokens: int | None) -> RequestRefused | None:
    """The refusal of a request that may not generate even the shortest output of its constraint."""
    if max_new_tokens is None or max_new_tokens >= constraint.min_tokens:
        return None
    return RequestRefused(
        f"max_new_tokens is {max_new_tokens}, but the shortest {constraint.output_name} has {constraint.min_tokens} "
        "tokens",
        param="max_new_tokens",
    )


def _room(request: Request, prompt_len: int, allocator: Allocator) -> int:
    """Number of generated tokens with KV that fits the pool beside the prompt (for a search, in each beam); -1 if the
    prompt does not fit. Beams share the whole pages of the prompt. Finished ones that will be leased are kept beside
    them, and copied at the end."""
    pool, page, width = allocator.total_tokens, allocator.page_size, request.sampling.beam_width
    if width is None:
        return pool - prompt_len
    partial = prompt_len % page
    sequences = width + 2 * request.num_retained
    pages = allocator.room_beside(prompt_len - partial) // page // sequences
    alone = 0 if prompt_len <= pool else -1  # the first token of all beams needs the prompt only
    return max(alone, pages * page - partial)


def _never_fits(request: Request, prompt_len: int, wanted: int | None, allocator: Allocator) -> str:
    """The refusal in words, with the pool that is too small. Only searches are limited by that for sliding windows:
    they hold all that follows their prompt."""
    beams, pool = _beams(request, allocator), allocator.total_tokens
    if beams and isinstance(allocator, WindowedAllocator) and allocator.windows.total_tokens < pool:
        return (
            f"prompt ({prompt_len} tokens) + max_new_tokens ({wanted}){beams} can never fit the pool of "
            f"{allocator.windows.total_tokens} tokens for sliding windows; use fewer beams or start the server with a "
            "larger --swa-full-tokens-ratio"
        )
    return (
        f"prompt ({prompt_len} tokens) + max_new_tokens ({wanted}){beams} can never fit the KV pool of {pool} tokens; "
        "shorten the request or start the server with a larger --max-total-tokens"
    )


def _beams(request: Request, allocator: Allocator) -> str:
    """The other factors of a search's needs, in words."""
    if request.sampling.beam_width is None:
        return ""
    pages = f" in pages of {allocator.page_size} tokens" if allocator.page_size > 1 else ""
    leases = (
        f", and twice more for each of the {request.num_retained} that retain_ttl keeps,"
        if request.num_retained
        else ""
    )
    return f" × beam_width ({request.sampling.beam_width}){pages}{leases}"


def check_logprob_start(options: LogprobOptions, prompt_len: int) -> None:
    """Raises RequestRefused if logprobs are wanted from behind the prompt's end."""
    if options.start_len >= prompt_len:
        raise RequestRefused(
            f"logprob_start_len is {options.start_len}; the prompt has {prompt_len} tokens. Use -1 for the logprobs of "
            "output tokens only",
            param="logprob_start_len",
        )


def check_logprob_limit(options: LogprobOptions | None, max_logprobs: int) -> None:
    """Raises RequestRefused for more alternatives than the server computes."""
    if options is None:
        return
    for name, wanted in (("top_logprobs_num", options.top_k), ("prompt_logprobs", options.input_top_k)):
        if wanted > max_logprobs:
            raise RequestRefused(
                f"{name} is {wanted}; this server gives at most {max_logprobs}. Use less, or raise --max-logprobs",
                param=name,
            )


def check_pooling(spec: RequestSpec) -> None:
    """Raises RequestRefused if a prompt that is pooled asks for an output beside its vector, or continues another."""
    sampling = spec.sampling
    if spec.pooling is None:
        return
    for name, is_wrong in (
        ("max_new_tokens", sampling.max_new_tokens != 0),
        ("n", sampling.n != 1),
        ("logprobs", spec.logprobs is not None),
        ("continuation_of", spec.continuation is not None or spec.predecessor is not None),
        ("retain_ttl", bool(spec.retain_ttl)),
        ("job_id", spec.job_id is not None),
    ):
        if is_wrong:
            raise RequestRefused(f"a prompt that is pooled has one vector and no output; leave {name} out", param=name)


def check_allowed_ids(request: Request, end_ids: Collection[int]) -> None:
    """Raises RequestRefused where only ids are allowed that end the request, and none may end it yet. end_ids: eos and
    stop ids of the request."""
    allowed, least = request.sampling.allowed_token_ids, request.sampling.min_new_tokens
    if allowed and least and all(token_id in end_ids for token_id in allowed):
        raise RequestRefused(
            f"min_new_tokens is {least}, but each of allowed_token_ids ends the output; allow others too",
            param="min_new_tokens",
        )


def check_beam_limits(sampling: SamplingParams, *, max_beam_width: int, rows: int, states: int = 0) -> None:
    """Raises RequestRefused for a width that can never be served. states: recurrent states; 0 for a model without."""
    width = sampling.beam_width
    if width is None:
        return
    bounds = [
        (max_beam_width, "the server's limit; raise --max-beam-width"),
        (rows, "the rows of the server; raise --max-running-requests"),
    ]
    if states:
        # A step writes a state for each beam. It reads others where several beams continue one: half as many at most.
        bounds.append(((2 * states + 1) // 3, "what the recurrent states of the server allow; raise --max-states"))
    for limit, fix in bounds:
        if width > limit:
            raise RequestRefused(f"beam_width is {width}, over {limit}, {fix}, or use less", param="beam_width")


def check_queue(spec: RequestSpec, queued: int, config: SchedulerConfig) -> None:
    """Raises RequestRefused if the queue is full: 429, or 400 for more sequences than an empty queue holds.

    Continuations may exceed its limit by the number of leases, so that newcomers cannot lock out a client that comes
    back for a lease.

    queued: sequences that wait for admission or for their parent.
    """
    limit = config.max_queued_requests
    comes_back = spec.continuation is not None or spec.predecessor is not None
    most = limit + (config.max_leased_requests if comes_back else 0)
    wanted = spec.sampling.num_requests
    if limit and wanted > most:
        raise RequestRefused(
            f"n is {wanted}, and the queue holds {most} requests (--max-queued-requests); ask for {most} or less",
            param="n",
        )
    if limit and queued + wanted > most:
        raise RequestRefused(
            f"{queued} requests wait already, and the queue holds {limit} (--max-queued-requests); try again later",
            code="queue_full",
        )


def timed_out(limit: float) -> RequestRefused:
    return RequestRefused(
        f"not finished after {limit:g} s (--request-timeout); ask for less, or try again later",
        code="request_timeout",
    )


def token_not_allowed() -> RequestRefused:
    return RequestRefused(
        "the sampler chose a token that this request does not allow, so the request was ended; this is a fault of the "
        "server or of the model's numbers. Send it again; if it fails again, leave out unusual sampling parameters",
        code="token_not_allowed",
    )


def stop_check_failed() -> RequestRefused:
    return RequestRefused(
        "the search for the stop strings or the stop regex of this request failed inside the server, so the request "
        "was ended. Send it again without them, and report it",
        code="stop_check_failed",
    )


def logits_not_finite() -> RequestRefused:
    return RequestRefused(
        "the model's logits for this request are not finite (NaN or infinity), so no token can be chosen; what may be "
        "spoiled in the cache is dropped. Send it again; if it fails again, the weights or the dtype do not suit it",
        code="logits_not_finite",
    )


def forward_failed(message: str) -> RequestRefused:
    return RequestRefused(message, code="forward_failed")


def kv_load_failed() -> RequestRefused:
    return RequestRefused("its KV could not be brought back from host memory; send it again", code="kv_load_failed")


def kv_cache_damaged() -> RequestRefused:
    return RequestRefused("the KV cache was found damaged and has been reset; send it again", code="kv_cache_damaged")


def lease_budget(config: SchedulerConfig, allocator: Allocator) -> LeaseBudget:
    """The share of the pools that leases may hold: all leases together, and those of one client."""
    max_tokens = int(config.max_leased_ratio * allocator.total_tokens)
    max_leases = config.max_leased_requests
    if config.max_states:  # each lease holds one
        max_leases = min(max_leases, max(1, int(config.max_leased_ratio * config.max_states)))
    return LeaseBudget(
        allocator.page_size,
        max_tokens=max_tokens,
        max_leases=max_leases,
        max_client_tokens=int(config.max_client_leased_ratio * max_tokens),
        max_client_leases=config.max_leases_per_client or -(-max_leases // 2),
    )


def duplicate_rid(rid: str) -> RequestRefused:
    return RequestRefused(
        f"rid {rid!r} is still running; use another rid or abort it first",
        code="duplicate_rid",
        param="rid",
    )
