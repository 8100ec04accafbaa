"""Anthropic's endpoints, ``/v1/messages`` and ``/v1/messages/count_tokens``. The versions and betas that their headers
name are not looked at."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...runtime.clients import Client
from ..anthropic.diagnostics import diagnose
from ..anthropic.errors import ERROR, error_body
from ..anthropic.message_response import ANSWER, EVENT, NUM_TOKENS, message_events, whole_message
from ..anthropic.messages import (
    BODY,
    COUNT_BODY,
    EXAMPLES,
    MESSAGE_NAMES,
    MessagesRequest,
    check_thinking,
    edited,
    parse_messages,
)
from ..chat.chats import ChatAnswer, Chats
from ..description.openapi import GENERATING, Operation
from ..fields.conversation_names import ConversationNames
from ..fields.ignored import Ignored
from ..fields.jobs import JOB_HEADERS
from ..fields.prompts import with_extra_body
from .generation_calls import GenerationCalls
from .keys import caller
from .route import POST, Route
from .wire.answers import EventFormat, JSONAnswer, client_gone, json_answer, named_event, size_of, until_disconnect

_EVENTS = EventFormat(named_event, error_body, b"")

_MESSAGES = Operation(
    summary="Answer a chat",
    about="Anthropic's messages. A longer chat continues from its cached prefix automatically.",
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
    answer=NUM_TOKENS,
    refusals=(404,),
    error=ERROR,
)


class MessagesRoutes:
    def __init__(self, calls: GenerationCalls, chats: Chats) -> None:
        self._calls = calls
        self._chats = chats
        self.routes = [
            Route("/v1/messages", self.messages, POST, error_body=error_body, operation=_MESSAGES),
            Route("/v1/messages/count_tokens", self.count_tokens, POST, error_body=error_body, operation=_COUNT),
        ]

    async def messages(self, request: Request) -> Response:
        async with self._calls.read_call(request, self._parse_messages) as (asked, ignored):
            self._check(asked, ignored)
            with MESSAGE_NAMES.translated():
                asked = await edited(asked, self._chats)
                answer = await self._chats.open_chat(caller(request), asked.call)
                asked = await self._diagnosed(asked, caller(request), answer)
        headers = _with_anthropic_id(self._calls.answer_headers(asked.call.rid, ignored))
        model, new_call_id = self._calls.shown_model(asked.model), self._chats.parsers.new_call_id
        if asked.call.stream:
            events = message_events(asked, model, answer, new_call_id)
            return self._calls.stream_answer(answer.answer, events, headers, _EVENTS)
        with MESSAGE_NAMES.translated(), answer.answer:
            updates = await until_disconnect(request.receive, answer.outputs())
        if updates is None:
            return client_gone()
        (update,) = updates
        size = size_of([update.output])
        return await json_answer(lambda: whole_message(asked, model, update, new_call_id), size, headers)

    async def count_tokens(self, request: Request) -> Response:
        async with self._calls.read_call(request, _parse_to_count) as (asked, ignored):
            self._check(asked, ignored)
            with MESSAGE_NAMES.translated():
                asked = await edited(asked, self._chats, may_overflow=True)
                ids = await self._chats.render(asked.call, may_overflow=True)
        counted: dict[str, Any] = {"input_tokens": len(ids)}
        if asked.applied_edits is not None:
            cleared = sum(edit["cleared_input_tokens"] for edit in asked.applied_edits)
            counted["context_management"] = {"original_input_tokens": len(ids) + cleared}
        return JSONAnswer(counted, headers=self._calls.report_ignored(ignored))

    async def _diagnosed(self, asked: MessagesRequest, client: Client, answer: ChatAnswer) -> MessagesRequest:
        """The request with the answer to its ``diagnostics``."""
        if asked.diagnostics is None or asked.diagnostics.rid is None:
            return asked
        try:
            compared = await self._chats.compare(client, answer, asked.diagnostics.rid)
        except BaseException:
            answer.answer.close()
            raise
        return dataclasses.replace(asked, diagnosis=diagnose(asked.diagnostics, compared))

    def _parse_messages(
        self, fields: dict[str, Any], rid: str | None, names: ConversationNames, ignored: Ignored
    ) -> MessagesRequest:
        return parse_messages(fields, rid=rid, defaults=self._calls.defaults, names=names, ignored=ignored)

    def _check(self, asked: MessagesRequest, ignored: Ignored) -> None:
        """Raises RequestRefused for another model. ignored: gets wishes that this one cannot be told of."""
        self._calls.check_model(asked.model)
        thoughts_are_known = self._chats.parsers.reasoning_name is not None
        check_thinking(asked, self._chats.renderer.source, ignored, thoughts_are_known=thoughts_are_known)


def _parse_to_count(
    fields: dict[str, Any], _: str | None, names: ConversationNames, ignored: Ignored
) -> MessagesRequest:
    return parse_messages(fields, counts_only=True, names=names, ignored=ignored)


def _with_anthropic_id(headers: dict[str, str]) -> dict[str, str]:
    """``request-id`` is where Anthropic's client looks for the request's name."""
    rid = headers.get("X-Request-Id")
    return headers if rid is None else headers | {"request-id": rid}
