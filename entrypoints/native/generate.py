"""Reads a request in the shape of SGLang's ``POST /generate`` and turns it into plain prompts. No HTTP, no model.

`foreign_fields` says what becomes of fields that are not served.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...scheduler.outcome import RequestRefused
from ..description.json_schema import taken
from ..fields.foreign_fields import foreign_properties, settle_fields
from ..fields.ignored import Ignored
from ..fields.prompts import LogprobFields, PromptBatch, PromptTokens, read_prompts, read_tokens
from ..fields.reading import PerPrompt, include_usage, spread, typed
from .generate_schema import PROPERTIES

BODY = taken({**PROPERTIES, **foreign_properties("generate")}, title="GenerateBody")


def parse_generate(
    fields: dict[str, Any],
    *,
    rid: str | None = None,
    max_prompts: int | None = None,
    ignored: Ignored | None = None,
) -> PromptBatch:
    """Fields of the request body -> prompts. ``rid`` is used if the body has none; max_prompts: None for no limit.
    ignored: gets what has no effect. Raises RequestRefused."""
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
