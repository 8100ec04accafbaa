"""Purpose, request and answer of an endpoint: the part of a route that people and tools read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .json_schema import Properties, Schema, answered, nullable, string

ERROR = answered(
    {
        "error": answered(
            {
                "message": string("What was wrong, which value, and what to change."),
                "type": string(),
                "code": nullable(string("One of those that docs/operations.md lists.")),
                "param": nullable(string("The field.")),
            }
        )
    },
    title="Error",
)

REFUSALS: Mapping[int, str] = {
    400: "Something in the request is wrong; the error names the field.",
    401: "The API key is missing or wrong.",
    403: "The key is not the admin's, or the request came from a foreign web page.",
    404: "There is no such thing.",
    405: "The path takes other methods.",
    408: "Not finished, or not arrived, in time.",
    409: "It contradicts what is going on.",
    410: "The parent was too long ago.",
    413: "The body is too large.",
    415: "The Content-Type is not that of this endpoint.",
    421: "The server does not go by this name.",
    429: "Too many requests wait; try again after Retry-After seconds.",
    431: "Path and headers are too large.",
    499: "The answer was aborted.",
    500: "The computation, or the server, failed.",
    503: "The server is not ready, overloaded or shutting down; try again after Retry-After seconds.",
    504: "The worker did not answer in time.",
}

ANYWHERE = (400, 403, 408, 421, 431, 500, 503)
OF_BODIES = (413, 415)
GENERATING = (404, 408, 409, 410, 429, 500, 503, 504)
"""Statuses of a request for tokens that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """summary: a few words. about: Markdown. body: None for endpoints that read none. examples: of bodies, by what they
    show. answer: of status 200; None where it is ``text``, of that content type. events: of a stream. refusals:
    statuses besides those of every endpoint."""

    summary: str
    about: str = ""
    tag: str = "Server"
    body: Schema | None = None
    body_is_optional: bool = False
    examples: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    query: Properties = field(default_factory=dict)
    headers: Properties = field(default_factory=dict)
    path: Properties = field(default_factory=dict)
    required_query: tuple[str, ...] = ()
    answer: Schema | None = None
    text: str | None = None
    events: Schema | None = None
    refusals: tuple[int, ...] = ()
    error: Schema = field(default_factory=lambda: ERROR)
