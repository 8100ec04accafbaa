"""Reads a request in the shape of SGLang's ``POST /generate`` and turns it into plain prompts. No HTTP, no model.

`foreign_fields` says what becomes of fields that are not served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...scheduler.outcome import RequestRefused
from ..description.json_schema import (
    IDS,
    TOKEN_ID,
    Properties,
    either,
    flag,
    list_of,
    nullable,
    per_prompt,
    string,
    taken,
    whole,
)
from ..fields.conversation_names import NO_NAMES, ConversationNames
from ..fields.foreign_fields import foreign_properties, settle_fields
from ..fields.ignored import Ignored
from ..fields.prompts import (
    MAX_NAMED_TOKENS,
    SHARED,
    LogprobFields,
    PromptBatch,
    PromptTokens,
    read_prompts,
    read_tokens,
)
from ..fields.reading import RID, STREAM, STREAM_OPTIONS, PerPrompt, include_usage, spread, typed
from ..fields.sampling import SAMPLING

SAMPLING_PARAMS = taken({**SAMPLING, **foreign_properties("sampling_params")}, title="SamplingParams")

_NAMED = list_of(TOKEN_ID, most=MAX_NAMED_TOKENS)

PROPERTIES: Properties = {
    "text": either(string(), list_of(string(), least=1), about="The prompt, or a batch of them; or give `input_ids`."),
    "input_ids": either(IDS, list_of(IDS, least=1), about="The prompt, or a batch of them, as token ids."),
    "sampling_params": either(
        SAMPLING_PARAMS, list_of(nullable(SAMPLING_PARAMS)), about="For all prompts, or one for each."
    ),
    "rid": either(RID, list_of(RID)),
    "stream": STREAM,
    "return_logprob": per_prompt(flag("Logprobs of the output's tokens.", default=False)),
    "logprob_start_len": per_prompt(
        whole("The first prompt position whose logprob is wanted; -1: none.", -1, default=-1)
    ),
    "top_logprobs_num": per_prompt(
        whole("Alternatives per position, up to --max-logprobs; needs return_logprob.", 0, default=0)
    ),
    "token_ids_logprob": either(
        _NAMED,
        list_of(nullable(_NAMED)),
        about="Ids whose logprobs are wanted at every position, for all prompts, or a list for each; needs "
        "return_logprob.",
    ),
    "return_text_in_logprobs": flag("Each token's text in the logprobs, instead of null.", default=False),
    "return_prompt_token_ids": flag("`prompt_token_ids` beside `output_ids`.", default=False),
    "stream_options": STREAM_OPTIONS,
    **SHARED,
}
"""Every field that is served; the reader has their names from here."""

BODY = taken({**PROPERTIES, **foreign_properties("generate")}, title="GenerateBody")

EXAMPLES: Mapping[str, dict[str, Any]] = {
    "a prompt": {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
    "a batch, with logprobs": {
        "text": ["One", "Two"],
        "sampling_params": {"max_new_tokens": 4},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    },
    "a beam search": {"text": "One", "sampling_params": {"beam_width": 3, "n": 2, "max_new_tokens": 4}},
    "a first stage, kept": {"text": "One", "retain_ttl": 10, "sampling_params": {"max_new_tokens": 4}},
    "a stream": {"text": "One", "stream": True, "sampling_params": {"n": 2, "max_new_tokens": 4}},
}


def parse_generate(
    fields: dict[str, Any],
    *,
    rid: str | None = None,
    max_prompts: int | None = None,
    names: ConversationNames = NO_NAMES,
    ignored: Ignored | None = None,
) -> PromptBatch:
    """Fields of the request body -> prompts. ``rid`` is used if the body has none; max_prompts: None for no limit.
    names: those of the conversation. ignored: gets what has no effect. Raises RequestRefused."""
    ignored = ignored or Ignored()
    fields = settle_fields(fields, "generate", PROPERTIES, ignored)
    fields = {name: value for name, value in fields.items() if value is not None}
    # Every event has the counts, so there is nothing to be included.
    include_usage(fields.get("stream_options"), typed(fields.get("stream", False), bool, "stream"), ignored)
    tokens = read_tokens(fields, max_prompts)
    logprobs = _logprobs(fields, tokens)
    returns_prompt = typed(fields.get("return_prompt_token_ids", False), bool, "return_prompt_token_ids")
    return read_prompts(
        fields,
        tokens,
        fields.get("sampling_params"),
        logprobs,
        rid=fields.get("rid", rid),
        returns_prompt=returns_prompt,
        names=names,
        ignored=ignored,
    )


def _logprobs(fields: dict[str, Any], tokens: PromptTokens) -> list[LogprobFields]:
    """One per prompt; token texts are returned for all prompts or for none."""
    with_text = typed(fields.get("return_text_in_logprobs", False), bool, "return_text_in_logprobs")
    per_prompt = PerPrompt(fields, tokens.size, tokens.is_batch)
    wanted = per_prompt.typed("return_logprob", bool, False)
    starts = per_prompt.typed("logprob_start_len", int, -1)
    tops = per_prompt.typed("top_logprobs_num", int, 0)
    named = _token_ids(fields.get("token_ids_logprob") or [], tokens)
    each = zip(wanted, starts, tops, named, strict=True)
    return [LogprobFields(wants, start, top, with_text, token_ids=ids) for wants, start, top, ids in each]


def _token_ids(given: Any, tokens: PromptTokens) -> list[tuple[int, ...]]:
    """One tuple per prompt, from a list of ids for all of them, or a list of such lists."""
    name = "token_ids_logprob"
    is_nested = isinstance(given, list) and any(ids is None or isinstance(ids, list) for ids in given)
    lists = spread(given, name, tokens.size, tokens.is_batch) if is_nested else [given] * tokens.size
    try:
        return [() if ids is None else msgspec.convert(ids, tuple[int, ...]) for ids in lists]
    except msgspec.ValidationError:
        raise RequestRefused(f"{name} takes a list of token ids, or one list for each prompt", param=name) from None
