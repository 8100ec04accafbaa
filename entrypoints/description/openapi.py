"""Describes each endpoint as an `Operation`, and puts all of them together as an OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .json_schema import Properties, Schema, answered, nullable, string

ERROR = answered(
    {
        "error": answered(
            {
                "message": string("What was wrong, which value, and what to change."),
                "type": string(),
                "code": nullable(string("An error code; docs/operations.md lists them.")),
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
    421: "The server does not accept this host name.",
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


# -- the document ------------------------------------------------------------------------------------------------------

JSON = "application/json"
EVENTS = "text/event-stream"

_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
"""A parameter in a path. The framework also takes its kind, which OpenAPI does not."""


class Described(NamedTuple):
    """A route, as the document needs it. needs_key: a server with API keys asks for one."""

    path: str
    methods: tuple[str, ...]
    operation: Operation
    media: str
    needs_key: bool


def openapi_document(routes: Iterable[Described], *, title: str, version: str, about: str) -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    components: dict[str, Schema] = {}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        at = paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})
        for method in route.methods:
            at[method.lower()] = _operation(route, method, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": about},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": dict(sorted(components.items())),
        },
    }


def _operation(route: Described, method: str, components: dict[str, Schema]) -> dict[str, Any]:
    operation = route.operation
    described: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', route.path).rstrip('_')}",
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": _responses(operation, _refusals(route, method), components, method),
    }
    if operation.about:
        described["description"] = operation.about
    names = _PARAMETER.findall(route.path)
    parameters = [_parameter("path", name, operation.path.get(name, string()), True) for name in names]
    required = operation.required_query
    parameters += [_parameter("query", name, schema, name in required) for name, schema in operation.query.items()]
    parameters += [_parameter("header", name, schema, False) for name, schema in operation.headers.items()]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None and method == "POST":
        described["requestBody"] = {
            "required": not operation.body_is_optional,
            "content": {route.media: {"schema": _hoisted(operation.body, components)} | _examples(operation)},
        }
    if not route.needs_key:
        described["security"] = []
    return described


def _refusals(route: Described, method: str) -> list[int]:
    operation = route.operation
    statuses = {*ANYWHERE, *operation.refusals}
    if route.needs_key:
        statuses.add(401)
    if method == "POST":  # a body that is not read needs its content type, too
        statuses.update(OF_BODIES if operation.body is not None else (415,))
    return sorted(statuses)


def _responses(operation: Operation, refusals: list[int], components: dict[str, Schema], method: str) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content[JSON] = {"schema": _hoisted(operation.answer, components)}
    if operation.text is not None:
        content[operation.text] = {"schema": {"type": "string"}}
    if operation.events is not None:
        content[EVENTS] = {"schema": _event(_hoisted(operation.events, components))}
    has_content = method != "HEAD"
    error = {"content": {JSON: {"schema": _hoisted(operation.error, components)}}} if has_content else {}
    responses = {"200": {"description": "The answer."} | ({"content": content} if has_content else {})}
    return responses | {str(status): {"description": REFUSALS[status], **error} for status in refusals}


def _event(data: Schema) -> Schema:
    """A server-sent event, as OpenAPI 3.2 describes one. Its data are JSON, or the [DONE] that ends a stream."""
    json = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    said = {"anyOf": [{"const": "[DONE]"}, json]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": said}, "required": ["data"]}


def _examples(operation: Operation) -> dict[str, Any]:
    shown = {about: {"summary": about, "value": body} for about, body in operation.examples.items()}
    return {"examples": shown} if shown else {}


def _parameter(place: str, name: str, schema: Schema, required: bool) -> dict[str, Any]:
    about = {"description": schema["description"]} if "description" in schema else {}
    plain = {key: value for key, value in schema.items() if key != "description"}
    return {"in": place, "name": name, "required": required, "schema": plain, **about}


def _hoisted(schema: Any, components: dict[str, Schema]) -> Any:
    """The schema, with a reference in place of each part that has a title, and those parts among the components."""
    if isinstance(schema, list):
        return [_hoisted(item, components) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner: Properties = {name: _hoisted(part, components) for name, part in schema.items()}
    title = schema.get("title")
    if not isinstance(title, str):  # a field may be called title
        return inner
    if components.setdefault(title, inner) != inner:
        raise ValueError(f"two schemas have the title {title!r}")
    return {"$ref": f"#/components/schemas/{title}"}
