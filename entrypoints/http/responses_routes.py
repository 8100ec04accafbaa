"""OpenAI's Responses, ``/v1/responses``."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...scheduler.outcome import RequestRefused
from ..description.json_schema import Properties, enum, string, whole
from ..description.openapi import GENERATING, Operation
from ..fields.conversation_names import ConversationNames
from ..fields.ignored import Ignored
from ..fields.jobs import JOB_HEADERS
from ..fields.prompts import with_extra_body
from ..fields.reading import one_of
from ..openai.responses.fields import BODY, EXAMPLES, ResponseRequest, parse_response
from ..openai.responses.response_object import ANSWER, DELETED, EVENT, ITEMS
from ..openai.responses.responses import Responses
from .generation_calls import GenerationCalls
from .keys import caller
from .route import DELETE, GET, POST, Route
from .wire.answers import EventFormat, JSONAnswer, client_gone, error_body, named_event, until_disconnect
from .wire.query import NAMESPACE_QUERY, read_namespace_query

_EVENTS = EventFormat(named_event, error_body, b"")

_INCLUDE = ("include", "include[]")
"""Parameters that change nothing: the response includes what its request asked for."""

_NO_STREAM: dict[str, tuple] = {"stream": ("false",), "starting_after": (), "include_obfuscation": ("false",)}
_MAX_ITEMS = 100

_INCLUDE_QUERY: Properties = dict.fromkeys(_INCLUDE, string("No effect: this is decided when the response is created."))
_CREATE = Operation(
    summary="Make a response",
    about="OpenAI's responses. `previous_response_id` is a continuation: `metadata` says what was inherited.",
    tag="OpenAI",
    body=with_extra_body(BODY),
    headers=JOB_HEADERS,
    examples=EXAMPLES,
    answer=ANSWER,
    events=EVENT,
    refusals=GENERATING,
)
_GET = Operation(
    summary="Read a response",
    tag="OpenAI",
    query=NAMESPACE_QUERY
    | _INCLUDE_QUERY
    | {
        "stream": enum("false", about="A stored response is not streamed."),
        "include_obfuscation": enum("false", about="Nothing is obfuscated."),
    },
    answer=ANSWER,
    refusals=(404,),
)
_DELETE = Operation(
    summary="Forget a response", tag="OpenAI", query=NAMESPACE_QUERY, answer=DELETED, refusals=(404, 504)
)
_CANCEL = Operation(summary="Stop a response", tag="OpenAI", query=NAMESPACE_QUERY, answer=ANSWER, refusals=(404,))
_ITEMS = Operation(
    summary="List the input items of a response",
    tag="OpenAI",
    query=NAMESPACE_QUERY
    | _INCLUDE_QUERY
    | {
        "after": string("The id of an item: list those behind it."),
        "limit": whole("", 1, _MAX_ITEMS, default=20),
        "order": enum("asc", "desc", default="desc"),
    },
    answer=ITEMS,
    refusals=(404,),
)


class ResponsesRoutes:
    def __init__(self, calls: GenerationCalls, responses: Responses) -> None:
        self._calls = calls
        self._responses = responses
        self.routes = [
            Route("/v1/responses", self.create_response, POST, operation=_CREATE),
            Route("/v1/responses/{response_id}", self.get_response, GET, operation=_GET),
            Route("/v1/responses/{response_id}", self.delete_response, DELETE, operation=_DELETE),
            Route("/v1/responses/{response_id}/cancel", self.cancel_response, POST, operation=_CANCEL),
            Route("/v1/responses/{response_id}/input_items", self.input_items, GET, operation=_ITEMS),
        ]

    async def create_response(self, request: Request) -> Response:
        async with self._calls.read_call(request, self._parse_response) as (asked, ignored):
            self._calls.check_model(asked.model)
            running = await self._responses.open_response(caller(request), asked)
        headers = self._calls.answer_headers(asked.call.rid, ignored)
        if asked.background:
            return _json(self._responses.in_background(running), headers)
        if asked.stream:
            return self._calls.stream_answer(running, running.events(), headers, _EVENTS)
        with running:
            body = await until_disconnect(request.receive, running.whole())
        return client_gone() if body is None else _json(body, headers)

    def _parse_response(
        self, fields: dict[str, Any], rid: str | None, names: ConversationNames, ignored: Ignored
    ) -> ResponseRequest:
        return parse_response(fields, rid=rid, defaults=self._calls.defaults, names=names, ignored=ignored)

    async def get_response(self, request: Request, response_id: str) -> Response:
        namespace, _ = read_namespace_query(request, _INCLUDE, _NO_STREAM)
        return _json(self._responses.get_response(caller(request), namespace, response_id))

    async def delete_response(self, request: Request, response_id: str) -> Response:
        namespace, _ = read_namespace_query(request)
        await self._responses.delete_response(caller(request), namespace, response_id)
        return JSONAnswer({"id": response_id, "object": "response", "deleted": True})

    async def cancel_response(self, request: Request, response_id: str) -> Response:
        namespace, _ = read_namespace_query(request)
        return _json(await self._responses.cancel_response(caller(request), namespace, response_id))

    async def input_items(self, request: Request, response_id: str) -> Response:
        namespace, given = read_namespace_query(request, (*_INCLUDE, "after", "limit", "order"))
        items = self._responses.input_items(caller(request), namespace, response_id)
        if one_of(given.get("order", "desc"), ("asc", "desc"), "order") == "desc":
            items = items[::-1]
        limit = given.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_ITEMS:
            raise RequestRefused(f"limit is {limit[:20]!r}; use 1 to {_MAX_ITEMS}", param="limit")
        if (after := given.get("after")) is not None:
            at = next((number for number, item in enumerate(items) if item["id"] == after), None)
            if at is None:
                raise RequestRefused(f"after is {after[:100]!r}, and no item has that id", param="after")
            items = items[at + 1 :]
        shown = items[: int(limit)]
        ids = [item["id"] for item in shown] or [None]
        more = len(items) > len(shown)
        return JSONAnswer({"object": "list", "data": shown, "first_id": ids[0], "last_id": ids[-1], "has_more": more})


def _json(body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, headers=headers, media_type="application/json")
