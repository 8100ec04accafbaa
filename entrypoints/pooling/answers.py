"""Parts that answers about pooled prompts share: the id, the token counts, and OpenAI's list of one item per prompt."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ...runtime.answer import Output
from ...scheduler.outcome import FoundTokens
from ..description.json_schema import COUNT, answered, enum, list_of, string

USAGE = answered(
    {
        "prompt_tokens": COUNT,
        "total_tokens": COUNT,
        "completion_tokens": COUNT,
        "prompt_tokens_details": answered({"cached_tokens": COUNT}),
    },
    title="PoolingUsage",
)


def list_schema(item: dict[str, Any], title: str) -> dict[str, Any]:
    """The JSON schema of `list_answer`. ``item`` is the schema of one item of its data."""
    return answered(
        {
            "id": string(),
            "object": enum("list"),
            "created": COUNT,
            "model": string(),
            "data": list_of(item),
            "usage": USAGE,
        },
        title=title,
    )


def list_answer(prefix: str, outputs: list[Output], model: str, data: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """An answer with one item of data per prompt. ``prefix`` begins its id, ``model`` is the name shown to clients. An
    iterator as ``data`` is passed on, so that long lists are computed while they are written."""
    return {
        "id": response_id(prefix, outputs),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage_of(outputs),
    }


def usage_of(outputs: list[Output]) -> dict[str, Any]:
    """Token counts of all prompts together, as `USAGE` describes them."""
    prompt = sum(output.prompt_tokens for output in outputs)
    found = sum((output.found for output in outputs), FoundTokens())
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": found.total},
    }


def response_id(prefix: str, outputs: list[Output]) -> str:
    """vLLM's form, with the name by which the caller may abort the call."""
    first = outputs[0].prompt
    return f"{prefix}-{first.group or first.rid}"
