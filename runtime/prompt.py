"""A caller's prompt, whether it came by HTTP or through the Engine, and the checks it must pass. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..scheduler.outcome import ContextOverflow, RequestRefused, context_exceeded
from ..scheduler.request_spec import ContinuationSpec, RequestSpec
from ..scheduler.sampling_params import SamplingParams


@dataclass(slots=True, frozen=True, kw_only=True)
class Prompt:
    """One prompt before it is tokenised: its spec, and the source of the spec's tokens.

    Exactly one of ``text`` and ``input_ids`` is given. With a continuation they hold the whole prompt, in case the
    parent has been forgotten, and both may be missing; the suffix is its ``suffix_text`` or ``suffix_ids``, or empty.
    group: the caller's name for the call that this prompt belongs to; aborting it aborts every prompt of the call.
    return_text_in_logprobs: logprobs include the text of each token.
    truncate_to: at most so many tokens are used, the last ones; -1: as many as leave room for the output. Not with a
    continuation: its beginning is there already.
    forced: text that the answer must begin with; it ends the prompt and is not part of the output.
    return_cache_report: whether the answer has a report of the cache's misses; None for the API's default.
    divergence: a JSON object: where a chat parts from its conversation's last turn; the cache report has it.
    details: JSON objects about how the prompt was made, by name; the answer reports them.
    """

    spec: RequestSpec
    group: str = ""
    text: str | None = None
    input_ids: list[int] | None = None
    suffix_ids: list[int] | None = None
    return_text_in_logprobs: bool = False
    return_cache_report: bool | None = None
    divergence: Mapping[str, Any] | None = None
    truncate_to: int | None = None
    forced: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rid(self) -> str:
        return self.spec.rid

    @property
    def sampling(self) -> SamplingParams:
        return self.spec.sampling

    @property
    def continuation(self) -> ContinuationSpec | None:
        return self.spec.continuation

    @property
    def source(self) -> str:
        """The field its tokens come from."""
        if self.continuation is not None:
            return "continuation_suffix" if self.suffix_ids is None else "continuation_ids"
        return "text" if self.input_ids is None else "input_ids"


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelLimits:
    """The limits of the served model, in tokens, as its worker reported them."""

    context_length: int
    vocab_size: int
    generates: bool = True
    """False for a model without a language head: it has no logits of the next token."""
    keeps_states: bool = False
    """True for a model with recurrent states, which can only continue from where one was left."""


def truncated(prompt: Prompt, ids: list[int], context_length: int) -> list[int]:
    """The prompt's ids cut to `Prompt.truncate_to`."""
    most = prompt.truncate_to
    if most == -1:
        sampling = prompt.sampling
        least_output = 1 if sampling.max_new_tokens is None else sampling.max_new_tokens
        most = context_length - max(least_output, sampling.min_new_tokens)
        if most < 1:
            return ids  # `check_prompt` says why there is no room
    return ids if most is None else ids[-most:]


def check_prompt(prompt: Prompt, input_ids: list[int], limits: ModelLimits) -> None:
    """Refuse what the model cannot serve. ``input_ids``: the prompt, tokenised. Raises RequestRefused."""
    _check_head(prompt, limits)
    if not input_ids:
        raise RequestRefused("the prompt is empty; give at least one token", param=prompt.source)
    _check_ids(prompt.input_ids, "input_ids", limits.vocab_size)
    _check_length(len(input_ids), prompt, limits.context_length)
    logprobs = prompt.spec.logprobs
    if logprobs is not None and logprobs.start_len >= len(input_ids):
        raise RequestRefused(
            f"logprob_start_len is {logprobs.start_len}; the prompt has {len(input_ids)} tokens. Use -1 for the "
            "logprobs of output tokens only",
            param="logprob_start_len",
        )
    _check_vocabulary(prompt, limits.vocab_size)


def check_continuation(prompt: Prompt, suffix_ids: list[int], limits: ModelLimits) -> None:
    """`check_prompt` for a continuation. Only the worker knows the parent's length, so this counts the parent as one
    token; the worker makes the final check. Raises RequestRefused."""
    assert prompt.continuation is not None
    _check_head(prompt, limits)
    _check_ids(prompt.suffix_ids, "continuation_ids", limits.vocab_size)
    _check_ids(prompt.input_ids, "input_ids", limits.vocab_size)
    _check_length(len(suffix_ids) + 1, prompt, limits.context_length, at_least=True)
    _check_vocabulary(prompt, limits.vocab_size)


def _check_head(prompt: Prompt, limits: ModelLimits) -> None:
    if prompt.spec.pooling is None and not limits.generates:
        raise RequestRefused(
            "this model generates no text: its checkpoint has no language head; use /v1/embeddings, /v1/score, "
            "/v1/rerank or /classify",
            code="unsupported_by_model",
        )


def _check_ids(ids: list[int] | None, name: str, vocab: int) -> None:
    if ids is not None and (bad := _outside(ids, vocab)) is not None:
        raise RequestRefused(f"{name} holds {bad}; token ids go from 0 to {vocab - 1}", param=name)


def _check_length(length: int, prompt: Prompt, context: int, *, at_least: bool = False) -> None:
    """length: of the prompt, in tokens; at_least: it may be longer."""
    sampling = prompt.sampling
    wanted = sampling.max_new_tokens
    if length + (wanted != 0) > context:
        raise context_exceeded(ContextOverflow(context, length, at_least=at_least), prompt.source)
    if prompt.spec.clamps_output:
        wanted = None
    for name, output in (("max_new_tokens", wanted or 0), ("min_new_tokens", sampling.min_new_tokens)):
        if length + output > context:
            raise context_exceeded(ContextOverflow(context, length, output, at_least), name)


def _check_vocabulary(prompt: Prompt, vocab: int) -> None:
    sampling = prompt.sampling
    if sampling.beam_width is not None and sampling.beam_width > vocab:
        raise RequestRefused(
            f"beam_width is {sampling.beam_width}; the vocabulary has {vocab} tokens: use {vocab} or less",
            param="beam_width",
        )
    if prompt.spec.pooling is not None and (bad := _outside(list(prompt.spec.pooling.token_ids), vocab)) is not None:
        name = "token_ids_logprob"
        raise RequestRefused(f"{name} holds token id {bad}; token ids go from 0 to {vocab - 1}", param=name)
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if (bad := _outside(list(getattr(sampling, name) or ()), vocab)) is not None:
            raise RequestRefused(f"{name} holds token id {bad}; token ids go from 0 to {vocab - 1}", param=name)
    logprobs = prompt.spec.logprobs
    if logprobs is not None and (bad := _outside(list(logprobs.token_ids), vocab)) is not None:
        name = "token_ids_logprob"
        raise RequestRefused(f"{name} holds token id {bad}; token ids go from 0 to {vocab - 1}", param=name)
    if logprobs is not None:
        for name, wanted in (("top_logprobs_num", logprobs.top_k), ("prompt_logprobs", logprobs.input_top_k)):
            if wanted > vocab:
                raise RequestRefused(f"{name} is {wanted}; the vocabulary has {vocab} tokens", param=name)


def _outside(ids: list[int], vocab: int) -> int | None:
    """The first id outside the vocabulary, or None."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab):
        return None
    return next(token_id for token_id in ids if not 0 <= token_id < vocab)
