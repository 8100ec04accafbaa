"""OpenAI's chat endpoint, ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import Response

from ....runtime.text.token_bytes import TokenBytes
from ...chat.chats import Chats
from ...description.operation import GENERATING, Operation
from ...fields.ignored import Ignored
from ...fields.jobs import JOB_HEADERS
from ...fields.prompts import with_extra_body
from ...openai.chat import BODY, CHAT_NAMES, EXAMPLES, ChatRequest, parse_chat
from ...openai.chat_response import ANSWER, CHUNK, ChatResponse
from ..keys import caller
from ..route import POST, Route
from ..wire.answers import client_gone, json_answer, size_of, until_disconnect
from .calls import GenerationCalls

_CHAT = Operation(
    summary="Answer a chat",
    about="OpenAI's chat completions. A chat that has grown goes on from what is cached of it by itself.",
    tag="OpenAI",
    body=with_extra_body(BODY),
    headers=JOB_HEADERS,
    examples=EXAMPLES,
    answer=ANSWER,
    events=CHUNK,
    refusals=GENERATING,
)


class ChatRoutes:
    def __init__(self, calls: GenerationCalls, chats: Chats, token_bytes: TokenBytes) -> None:
        self._calls = calls
        self._chats = chats
        self._token_bytes = token_bytes
        self.routes = [Route("/v1/chat/completions", self.completions, POST, operation=_CHAT)]

    async def completions(self, request: Request) -> Response:
        calls = self._calls
        async with calls.read_call(request, self._parse_chat) as (asked, ignored):
            calls.check_model(asked.model)
            with CHAT_NAMES.translated():
                answer = await self._chats.open_chat(caller(request), asked.call)
        headers = calls.answer_headers(asked.call.rid, ignored)
        response = ChatResponse(asked, calls.model, self._chats.parsers, self._token_bytes)
        if asked.call.stream:
            return calls.stream_answer(answer.answer, response.chunks(answer), headers)
        with CHAT_NAMES.translated(), answer.answer:
            updates = await until_disconnect(request.receive, answer.outputs())
        if updates is None:
            return client_gone()
        size = size_of([output for output, _ in updates])
        return await json_answer(lambda: response.whole(updates), size, headers)

    def _parse_chat(self, fields: dict[str, Any], rid: str | None, ignored: Ignored) -> ChatRequest:
        return parse_chat(fields, rid=rid, defaults=self._calls.defaults, ignored=ignored)
