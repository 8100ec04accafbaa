"""The response object: its settings, which it repeats, and what became of it."""

from __future__ import annotations

import time
from typing import Any, Literal

from ....runtime.answer import Output
from ....scheduler.outcome import RequestRefused
from ...fields.output_details import cached_tokens, stage_details
from ...fields.reading import STORED_RESPONSE_PREFIX
from ...http_statuses import status_of
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

    def ended(self, status: Status, items: list[dict], output: Output, reasoning_tokens: int) -> dict[str, Any]:
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

    def failed(self, error: RequestRefused, items: list[dict]) -> dict[str, Any]:
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
        "input_tokens_details": {**cached_tokens(output.found), "cache_write_tokens": 0},
        "output_tokens": output.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": output.prompt_tokens + output.completion_tokens,
    }
