"""Anthropic's endpoints, ``/v1/messages`` and ``/v1/messages/count_tokens``. The versions and betas that their headers
name are not looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ....runtime.tokenizer_manager import TokenizerManager
from ...anthropic.errors import error_body
from ...anthropic.message_response import whole_message
from ...anthropic.message_schema import ANSWER, ERROR, EVENT, EXAMPLES, NUM_TOKENS
from ...anthropic.message_stream import message_events
from ...anthropic.messages import (
    BODY,
    COUNT_BODY,
    MESSAGE_NAMES,
    MessagesRequest,
    check_thinking,
    edited,
    parse_messages,
)
from ...chat.chats import Chats
from ...description.operation import GENERATING, Operation
from ...fields.ignored import Ignored, IgnoredLog
from ...fields.reading import check_model
from ...fields.shared_schema import JOB_HEADERS, with_extra_body
from ...server_config import ServerArgs
from ..callers import caller
from ..route import POST, Route
from ..wire.bodies import Bodies, parsed
from ..wire.large_json import json_answer, size_of
from ..wire.transport import (
    EventFormat,
    EventStream,
    JSONAnswer,
    client_gone,
    named_event,
    request_id,
    until_disconnect,
)

_EVENTS = EventFormat(named_event, error_body, b"")

_MESSAGES = Operation(
    summary="Answer a chat",
    about="Anthropic's messages. A chat that has grown goes on from what is cached of it by itself.",
    tag="Anthropic",
    body=with_extra_body(BODY),
    headers=JOB_HEADERS,
    examples=EXAMPLES,
    answer=ANSWER,
    events=EVENT,
    refusals=(*GENERATING, 499),
    error=ERROR,
)
_COUNT = Operation(
    summary="Count the tokens of a chat",
    tag="Anthropic",
    body=with_extra_body(COUNT_BODY),
    headers=JOB_HEADERS,
    answer=NUM_TOKENS,
    refusals=(404,),
    error=ERROR,
)


class MessagesRoutes:
    def __init__(
        self,
        manager: TokenizerManager,
        chats: Chats,
        args: ServerArgs,
        bodies: Bodies,
        defaults: Mapping[str, Any],
        ignored: IgnoredLog,
    ) -> None:
        """defaults: sampling parameters for what requests leave out."""
        self._manager = manager
        self._chats = chats
        self._args = args
        self._bodies = bodies
        self._defaults = defaults
        self._ignored = ignored

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.messages, POST, error_body=error_body, operation=_MESSAGES),
            Route("/v1/messages/count_tokens", self.count_tokens, POST, error_body=error_body, operation=_COUNT),
        ]

    async def messages(self, request: Request) -> Response:
        async with self._bodies.generation(request) as fields:
            ignored = self._ignored.begin()
            rid = request.headers.get("x-request-id")
            asked = await parsed(
                request, lambda: parse_messages(fields, rid=rid, defaults=self._defaults, ignored=ignored)
            )
            self._check(asked, ignored)
            with MESSAGE_NAMES.translated():
                asked = await edited(asked, self._chats)
                answer = await self._chats.open(caller(request), asked.call)
        headers = _headers(asked.call.rid) | self._ignored.report(ignored)
        model, new_call_id = self._args.served_model_name, self._chats.parsers.new_call_id
        if asked.call.stream:
            events = message_events(asked, model, answer, new_call_id)
            return EventStream(answer.answer, events, headers, self._manager.metrics.call_refused, _EVENTS)
        with MESSAGE_NAMES.translated(), answer.answer:
            updates = await until_disconnect(request.receive, answer.outputs())
        if updates is None:
            return client_gone()
        (update,) = updates
        size = size_of([update.output])
        return await json_answer(lambda: whole_message(asked, model, update, new_call_id), size, headers)

    async def count_tokens(self, request: Request) -> Response:
        async with self._bodies.generation(request) as fields:
            ignored = self._ignored.begin()
            asked = await parsed(request, lambda: parse_messages(fields, counts_only=True, ignored=ignored))
            self._check(asked, ignored)
            with MESSAGE_NAMES.translated():
                asked = await edited(asked, self._chats, may_overflow=True)
                ids = await self._chats.render(asked.call, may_overflow=True)
        counted: dict[str, Any] = {"input_tokens": len(ids)}
        if asked.applied_edits is not None:
            cleared = sum(edit["cleared_input_tokens"] for edit in asked.applied_edits)
            counted["context_management"] = {"original_input_tokens": len(ids) + cleared}
        return JSONAnswer(counted, headers=self._ignored.report(ignored))

    def _check(self, asked: MessagesRequest, ignored: Ignored) -> None:
        """Raises RequestRefused for another model. ignored: gets wishes that this one cannot be told of."""
        check_model(asked.model, self._args.required_model_name)
        thoughts_are_known = self._chats.parsers.reasoning_name is not None
        check_thinking(asked, self._chats.renderer.source, ignored, thoughts_are_known=thoughts_are_known)


def _headers(rid: str) -> dict[str, str]:
    """``request-id`` is where Anthropic's client looks for the name."""
    headers = request_id(rid)
    return headers | {"request-id": rid} if headers else {}
