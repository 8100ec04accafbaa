"""The response object: its settings, which it repeats, and what became of it."""

from __future__ import annotations

import time
from typing import Any, Literal

from ....runtime.answer import Output
from ....scheduler.outcome import RequestRefused
from ...description.json_schema import (
    COUNT,
    Schema,
    answered,
    enum,
    flag,
    list_of,
    nullable,
    number,
    open_object,
    string,
    whole,
)
from ...fields.grammars import TEXT_FORMAT
from ...fields.output_details import (
    CACHE_REPORT,
    CACHED_TOKENS,
    STAGE_DETAILS,
    cache_report,
    cached_tokens,
    stage_details,
)
from ...fields.reading import STORED_RESPONSE_PREFIX
from ...http_statuses import status_of
from ..common import NULLABLE_TEXT
from .fields import ResponseRequest

Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]

BATON_METADATA = ("baton_path", "baton_inherited_tokens", "baton_recomputed_tokens")
"""Keys of ``metadata`` that are the server's: what became of the continuation. A client's own are dropped, since it may
have sent back those of the response before."""

_STANDS_ALONE = {"path": "fallback", "inherited_tokens": 0, "recomputed_tokens": 0, "trimmed_tokens": 0}


class ResponseObject:
    """Builds the states of one response."""

    def __init__(self, request: ResponseRequest, model: str) -> None:
        """``model``: the served name."""
        self.id = f"{STORED_RESPONSE_PREFIX}{request.call.rid}"
        self._request = request
        self._head = {"id": self.id, "object": "response", "created_at": int(time.time()), "model": model}
        self._metadata = {key: value for key, value in request.metadata.items() if key not in BATON_METADATA}

    def opening_state(self, status: Literal["queued", "in_progress"]) -> dict[str, Any]:
        """Before its end; what it says so far comes with the events."""
        return self._state(status, [], {"metadata": self._metadata})

    def ended_state(self, status: Status, items: list[dict], output: Output, reasoning_tokens: int) -> dict[str, Any]:
        details = {"rid": output.prompt.rid, **stage_details(output)}
        metadata = self._metadata
        if self._request.previous is not None:
            details.setdefault("continuation", _STANDS_ALONE)
        if (went_on := details.get("continuation")) is not None:
            said = (went_on["path"], went_on["inherited_tokens"], went_on["recomputed_tokens"])
            metadata = metadata | dict(zip(BATON_METADATA, map(str, said), strict=True))
        more = {"usage": _usage(output, reasoning_tokens), "metadata": metadata, "baton": details}
        if status == "completed":
            more["completed_at"] = int(time.time())
        if status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._state(status, items, more)

    def failed_state(self, error: RequestRefused, items: list[dict]) -> dict[str, Any]:
        status = status_of(error)
        codes = {429: "rate_limit_exceeded"}
        code = codes.get(status, "server_error" if status >= 500 else "invalid_prompt")
        said = {"code": code, "message": error.message}
        return self._state("failed", items, {"error": said, "metadata": self._metadata})

    def _state(self, status: Status, items: list[dict], more: dict[str, Any]) -> dict[str, Any]:
        always = {
            "status": status,
            "background": self._request.background,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": items,
            "usage": None,
        }
        return self._head | always | self._request.echo | more


def _usage(output: Output, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": output.prompt_tokens,
        # OpenAI counts what it charges for keeping; here that is nothing.
        "input_tokens_details": {**cached_tokens(output.found), "cache_write_tokens": 0, **cache_report(output)},
        "output_tokens": output.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": output.prompt_tokens + output.completion_tokens,
    }


# -- as /openapi.json describes them-----------------------------------------------------------------------------------

_USAGE = answered(
    {
        "input_tokens": COUNT,
        "input_tokens_details": answered({**CACHED_TOKENS, "cache_write_tokens": COUNT}, optional=CACHE_REPORT),
        "output_tokens": COUNT,
        "output_tokens_details": answered({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    },
    title="ResponseUsage",
)

_OUTPUT: Schema = {
    "title": "OutputItem",
    "type": "object",
    "properties": {
        "id": string(),
        "type": enum("message", "reasoning", "function_call", "custom_tool_call"),
        "status": string(),
    },
    "required": ["id", "type", "status"],
    "description": "message: role, content. reasoning: content. function_call: call_id, name, arguments; namespace, "
    "where its tool has one. custom_tool_call: call_id, name, input.",
}

ANSWER = answered(
    {
        "id": string("resp_, and the rid."),
        "object": enum("response"),
        "created_at": whole("Unix time.", 0),
        "completed_at": nullable(whole("Unix time.", 0)),
        "model": string(),
        "status": enum("queued", "in_progress", "completed", "incomplete", "cancelled", "failed"),
        "background": flag(),
        "error": nullable(answered({"code": string(), "message": string()})),
        "incomplete_details": nullable(answered({"reason": enum("max_output_tokens")})),
        "output": list_of(_OUTPUT),
        "usage": nullable(_USAGE),
        "instructions": NULLABLE_TEXT,
        "max_output_tokens": nullable(COUNT),
        "max_tool_calls": {"type": "null"},
        "metadata": open_object(
            "With baton_path, baton_inherited_tokens and baton_recomputed_tokens.", values=string()
        ),
        "parallel_tool_calls": flag(),
        "previous_response_id": NULLABLE_TEXT,
        "prompt_cache_key": {},
        "reasoning": answered({"effort": NULLABLE_TEXT, "summary": {"type": "null"}}),
        "safety_identifier": {},
        "store": flag(),
        "temperature": number(),
        "text": answered({"format": TEXT_FORMAT}),
        "tool_choice": {},
        "tools": list_of(open_object()),
        "top_logprobs": COUNT,
        "top_p": number(),
        "truncation": enum("disabled"),
        "user": NULLABLE_TEXT,
    },
    title="Response",
    optional={"baton": answered({"rid": string()}, title="ResponseDetails", optional=STAGE_DETAILS)},
)

EVENT: Schema = {
    "title": "ResponseEvent",
    "type": "object",
    "properties": {"type": string("response.created, and so on, as OpenAI has them."), "sequence_number": COUNT},
    "required": ["type", "sequence_number"],
}

ITEMS = answered(
    {
        "object": enum("list"),
        "data": list_of(open_object()),
        "first_id": NULLABLE_TEXT,
        "last_id": NULLABLE_TEXT,
        "has_more": flag(),
    },
    title="InputItems",
)

DELETED = answered({"id": string(), "object": enum("response"), "deleted": enum(True)}, title="DeletedResponse")
