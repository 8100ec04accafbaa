"""Reads the fields of ``POST /v1/completions`` and turns them into plain prompts. No HTTP, no model.

The shared readers check sampling, batches, continuations and rids; their refusals are translated into OpenAI's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...scheduler.outcome import RequestRefused
from ...scheduler.sampling_params import MAX_SEQUENCES
from ..description.json_schema import IDS, Properties, either, flag, list_of, picked, string, taken, whole
from ..fields.conversation_names import NO_NAMES, ConversationNames
from ..fields.field_names import FieldNames
from ..fields.foreign_fields import foreign_properties, settle_fields
from ..fields.ignored import Ignored
from ..fields.prompts import SHARED, LogprobFields, PromptBatch, read_prompts, read_tokens
from ..fields.reading import MODEL, STREAM, STREAM_OPTIONS, include_usage, shown, typed
from ..fields.sampling import NO_DEFAULTS, SAMPLING, with_defaults
from .common import (
    OF_THE_PROMPT,
    OPENAI_SAMPLING,
    OTHER_SAMPLING,
    REQUEST_RID,
    SAMPLING_OF_ALL,
    VLLM,
    check_temperature,
    overflow_words,
    read_prompt_logprobs,
    read_request_rid,
    read_truncation,
    wants_token_ids,
    with_vllm_names,
)

DEFAULT_MAX_TOKENS = 16

PROPERTIES: Properties = {
    "model": MODEL,
    "prompt": either(string(), IDS, list_of(string()), list_of(IDS), about="A text, token ids, or a list of either."),
    "max_tokens": SAMPLING["max_new_tokens"] | {"default": DEFAULT_MAX_TOKENS},
    "min_tokens": SAMPLING["min_new_tokens"],
    "stream": STREAM,
    "stream_options": STREAM_OPTIONS,
    "logprobs": whole("Logprobs of each token, and this many alternatives, up to --max-logprobs.", 0),
    "echo": flag("The text begins with the prompt.", default=False),
    "best_of": whole("Equal to n; of a beam search, its width.", 1, MAX_SEQUENCES),
    "use_beam_search": flag("Search for the n likeliest texts.", default=False),
    **SAMPLING_OF_ALL,
    **picked(SAMPLING, ("beam_width", "length_penalty", "early_stopping", "item_trie")),
    **VLLM,
    **OF_THE_PROMPT,
    **REQUEST_RID,
    **SHARED,
}
"""Every field that is served; the reader has their names from here."""

_SAMPLING = (*OPENAI_SAMPLING, *OTHER_SAMPLING, "beam_width", "length_penalty", "early_stopping", "item_trie")
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

COMPLETION_NAMES = FieldNames(
    prompt="prompt", overflow_words=overflow_words("prompt"), renamed=_RENAMED | {"top_logprobs_num": "logprobs"}
)

BODY = taken({**PROPERTIES, **foreign_properties("completions")}, title="CompletionBody")

EXAMPLES: Mapping[str, dict[str, Any]] = {
    "a prompt": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
    "its own logprobs": {"prompt": "One two", "max_tokens": 0, "echo": True, "logprobs": 2},
    "a batch, kept": {"prompt": ["One", "Two"], "max_tokens": 4, "n": 2, "retain_ttl": 10},
    "a beam search": {"prompt": "One", "max_tokens": 4, "n": 3, "use_beam_search": True, "temperature": 0},
    "a stream": {"prompt": "One", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
}


@dataclass(slots=True, frozen=True)
class CompletionRequest:
    """A parsed request. ``logprobs``: alternatives per token, or None for no logprobs at all; prompt_logprobs:
    the same for the prompt. token_ids: are the ids of prompts and outputs wanted?"""

    batch: PromptBatch
    model: str | None
    echo: bool
    logprobs: int | None
    include_usage: bool
    token_ids: bool
    prompt_logprobs: int | None

    @property
    def response_id(self) -> str:
        return f"cmpl-{self.batch.rid}"


def parse_completion(
    fields: dict[str, Any],
    *,
    rid: str | None = None,
    max_prompts: int | None = None,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    names: ConversationNames = NO_NAMES,
    ignored: Ignored | None = None,
) -> CompletionRequest:
    """Fields of the request body -> prompts. ``rid`` is used if the body has none; max_prompts: None for no limit;
    defaults: the model's sampling parameters. names: those of the conversation. ignored: gets what has no
    effect. Raises RequestRefused."""
    ignored = ignored or Ignored()
    fields = settle_fields(fields, "completions", PROPERTIES, ignored)
    fields = with_vllm_names({name: value for name, value in fields.items() if value is not None})
    echo = typed(fields.get("echo", False), bool, "echo")
    logprobs = _logprobs(fields.get("logprobs"))
    usage = include_usage(fields.get("stream_options"), typed(fields.get("stream", False), bool, "stream"), ignored)
    if echo and "continuation_of" in fields:
        raise RequestRefused("echo cannot return the parent's prompt; leave it out", param="echo")
    token_ids = wants_token_ids(fields)
    prompt_logprobs = read_prompt_logprobs(fields)
    truncate_to = read_truncation(fields)
    sampling = with_defaults(_sampling(fields), defaults)
    prompt = _prompt(fields)
    given_rid = read_request_rid(fields)
    with COMPLETION_NAMES.translated():
        tokens = read_tokens(fields | prompt, max_prompts)
        asked = _logprob_fields(logprobs, echo, prompt_logprobs)
        batch = read_prompts(
            fields,
            tokens,
            sampling,
            [asked] * tokens.size,
            rid=rid if given_rid is None else given_rid,
            returns_prompt=token_ids or (echo and truncate_to is not None),
            truncate_to=truncate_to,
            clamps_output="max_tokens" not in fields,
            names=names,
            ignored=ignored,
        )
    return CompletionRequest(
        batch=batch,
        model=fields.get("model"),
        echo=echo,
        logprobs=logprobs,
        include_usage=usage,
        token_ids=token_ids,
        prompt_logprobs=prompt_logprobs,
    )


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters in SGLang's names."""
    check_temperature(fields)
    sampling: dict[str, Any] = {"max_new_tokens": DEFAULT_MAX_TOKENS}
    sampling |= {name: fields[name] for name in _SAMPLING if name in fields}
    sampling |= {name: fields[theirs] for name, theirs in _RENAMED.items() if theirs in fields}
    if (width := _beam_width(fields)) is not None:
        sampling["beam_width"] = width
    return sampling


def _prompt(fields: dict[str, Any]) -> dict[str, Any]:
    """The prompt as ``text`` or ``input_ids``. A list of one prompt is that prompt, as the answer looks the same."""
    prompt = fields.get("prompt")
    is_continuation = "continuation_of" in fields
    if is_continuation and prompt in ("", [], [""]):
        return {}  # OpenAI's own client always sends a prompt; an empty one means none
    if prompt is None:
        if is_continuation:
            return {}
        raise RequestRefused("prompt is missing; give a string, token ids, or a list of either", param="prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(isinstance(item, str) for item in prompt):
        return {"text": prompt if prompt else ""}
    if not isinstance(prompt, str | list):
        raise RequestRefused(
            f"prompt is {shown(prompt)}; it takes a string, token ids, or a list of either", param="prompt"
        )
    return {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}


def _beam_width(fields: dict[str, Any]) -> Any:
    """How many beams the request asks for: ``beam_width``, or, as in vLLM, ``n`` with ``use_beam_search``. None for no
    search. Checks that ``best_of`` equals that width, or ``n`` without a search."""
    has_width = fields.get("beam_width", 0) != 0  # 0 means no search
    wanted = typed(fields.get("use_beam_search", has_width), bool, "use_beam_search")
    n = fields.get("n", 1)
    best_of = typed(fields["best_of"], int, "best_of") if "best_of" in fields else n
    if "best_of" in fields and not 1 <= best_of <= MAX_SEQUENCES:
        raise RequestRefused(f"best_of is {best_of}; use 1 to {MAX_SEQUENCES}", param="best_of")
    if not wanted:
        if has_width:
            raise RequestRefused(
                "beam_width is set and use_beam_search is false; leave one of them out", param="use_beam_search"
            )
        if best_of != n:
            raise RequestRefused(
                f"best_of is {best_of} and n is {shown(n)}; all outputs are returned: leave best_of out",
                param="best_of",
            )
        return None
    width = fields["beam_width"] if has_width else best_of
    if "best_of" in fields and best_of != width:
        raise RequestRefused(
            f"best_of is {best_of} and beam_width is {shown(width)}; they mean the same, leave one of them out",
            param="best_of",
        )
    return width


def _logprob_fields(logprobs: int | None, echo: bool, prompt_logprobs: int | None) -> LogprobFields:
    """The logprobs to compute for ``logprobs``, an echoed prompt included, and for ``prompt_logprobs``. Raises
    RequestRefused."""
    if logprobs is None and prompt_logprobs is None:
        return LogprobFields()
    echoed = logprobs if echo else None
    return LogprobFields(
        wanted=True,
        start_len=-1 if echoed is None and prompt_logprobs is None else 0,
        top=logprobs or 0,
        with_text=True,
        prompt_top=None if prompt_logprobs is None else max(prompt_logprobs, echoed or 0),
    )


def _logprobs(given: Any) -> int | None:
    return None if given is None else typed(given, int, "logprobs")
