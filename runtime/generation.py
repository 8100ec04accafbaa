"""What a caller asks for, whichever door it came through (HTTP, Engine), and how a call is refused. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..scheduler.sampling_params import SamplingParams

_INT32_MAX = 2**31 - 1


@dataclass(slots=True, frozen=True, kw_only=True)
class Prompt:
    """One prompt, continued ``sampling.n`` times. Exactly one of ``text`` and ``input_ids`` is given.

    group: the name the caller gave the call this prompt belongs to; aborting it aborts every prompt of the call.
    namespace: prompts of different namespaces share no cache.
    logprob_start_len: first prompt position whose logprob is wanted; -1 means only output tokens.
    """

    rid: str
    group: str = ""
    text: str | None = None
    input_ids: list[int] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    namespace: str = ""
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelLimits:
    """What the served model takes, in tokens, as its worker reported it."""

    context_length: int
    vocab_size: int


class RequestRefused(Exception):
    """A call that cannot be served. status: HTTP status; code: a word for programs; param: the field at fault."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param


def check_prompt(prompt: Prompt, input_ids: list[int], limits: ModelLimits) -> None:
    """Refuse what the model cannot serve. ``input_ids``: the prompt, tokenised. Raises RequestRefused."""
    context, vocab = limits.context_length, limits.vocab_size
    source = "text" if prompt.input_ids is None else "input_ids"
    sampling = prompt.sampling
    if not input_ids:
        raise RequestRefused(f"the prompt is empty; {source} must hold at least one token", param=source)
    if prompt.input_ids is not None and (bad := _outside(input_ids, vocab)) is not None:
        raise RequestRefused(f"input_ids holds {bad}; token ids go from 0 to {vocab - 1}", param="input_ids")
    if len(input_ids) >= context:
        raise RequestRefused(
            f"the prompt has {len(input_ids)} tokens; the context holds {context}, the output included. Shorten it",
            code="context_length_exceeded",
            param=source,
        )
    wanted = sampling.max_new_tokens
    if wanted is not None and len(input_ids) + wanted > context:
        raise RequestRefused(
            f"the prompt has {len(input_ids)} tokens and max_new_tokens is {wanted}, together "
            f"{len(input_ids) + wanted}; the context holds {context}. Use max_new_tokens <= {context - len(input_ids)}",
            code="context_length_exceeded",
            param="max_new_tokens",
        )
    if len(input_ids) + sampling.min_new_tokens > context:
        raise RequestRefused(
            f"the prompt has {len(input_ids)} tokens and min_new_tokens is {sampling.min_new_tokens}; the context "
            f"holds {context}. Use min_new_tokens <= {context - len(input_ids)}",
            code="context_length_exceeded",
            param="min_new_tokens",
        )
    if sampling.top_k > _INT32_MAX:
        raise RequestRefused(
            f"top_k is {sampling.top_k}; use -1 for the whole vocabulary ({vocab} tokens)", param="top_k"
        )
    for name in ("stop_token_ids", "logit_bias"):
        if (bad := _outside(list(getattr(sampling, name) or ()), vocab)) is not None:
            raise RequestRefused(f"{name} holds token id {bad}; token ids go from 0 to {vocab - 1}", param=name)
    if prompt.top_logprobs_num > vocab:
        raise RequestRefused(
            f"top_logprobs_num is {prompt.top_logprobs_num}; the vocabulary has {vocab} tokens",
            param="top_logprobs_num",
        )
    if prompt.logprob_start_len >= len(input_ids):
        raise RequestRefused(
            f"logprob_start_len is {prompt.logprob_start_len}; the prompt has {len(input_ids)} tokens. Use -1 for the "
            "logprobs of output tokens only",
            param="logprob_start_len",
        )


def _outside(ids: list[int], vocab: int) -> int | None:
    """The first id that is no token id, or None."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab):
        return None
    return next(token_id for token_id in ids if not 0 <= token_id < vocab)
