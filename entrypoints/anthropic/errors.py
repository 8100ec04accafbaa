"""Errors in Anthropic's shape."""

from __future__ import annotations

from typing import Any

from ...scheduler.outcome import ContextOverflow, RequestRefused
from ..description.json_schema import answered, enum, string
from ..http_statuses import status_of

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def overflow_words(overflow: ContextOverflow) -> str:
    """Anthropic's words for a request that is longer than the context, from which Claude Code reads the numbers."""
    if overflow.output:
        return (
            f"input length and `max_tokens` exceed context limit: {overflow.prompt} + {overflow.output} > "
            f"{overflow.context}, decrease input length or `max_tokens` and try again"
        )
    most = min(overflow.context, overflow.prompt - 1)  # a prompt that fills the context leaves no room for an answer
    return f"prompt is too long: {overflow.prompt} tokens > {most} maximum"


def error_body(error: RequestRefused) -> dict[str, Any]:
    """``details``: the code where Anthropic's client looks for one, and the field to change."""
    status = status_of(error)
    kind = "invalid_request_error" if status < 500 else "api_error"
    return {
        "type": "error",
        "error": {
            "type": _TYPES.get(status, kind),
            "message": error.message,
            "details": {"error_code": error.code, "param": error.param},
        },
    }


ERROR = answered(
    {
        "type": enum("error"),
        "error": answered(
            {
                "type": string(),
                "message": string("What was wrong, which value, and what to change."),
                "details": answered(
                    {"error_code": {"type": ["string", "null"]}, "param": {"type": ["string", "null"]}}
                ),
            }
        ),
    },
    title="MessageError",
)
