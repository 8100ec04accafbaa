"""OpenAI's chat endpoint, ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ....runtime.tokenizer_manager import TokenizerManager
from ...chat.chats import Chats
from ...description.operation import GENERATING, Operation
from ...fields.ignored import IgnoredLog
from ...fields.reading import check_model
from ...fields.shared_schema import JOB_HEADERS, with_extra_body
from ...openai.chat import BODY, CHAT_NAMES, parse_chat
from ...openai.chat_response import ChatResponse
from ...openai.chat_schema import ANSWER, CHUNK, EXAMPLES
from ...server_config import ServerArgs
from ..callers import caller
from ..route import POST, Route
from ..wire.bodies import Bodies, parsed
from ..wire.large_json import json_answer, size_of
from ..wire.transport import EventStream, client_gone, request_id, until_disconnect

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
        return [Route("/v1/chat/completions", self.completions, POST, operation=_CHAT)]

    async def completions(self, request: Request) -> Response:
        async with self._bodies.generation(request) as fields:
            ignored = self._ignored.begin()
            rid = request.headers.get("x-request-id")
            asked = await parsed(request, lambda: parse_chat(fields, rid=rid, defaults=self._defaults, ignored=ignored))
            check_model(asked.model, self._args.required_model_name)
            with CHAT_NAMES.translated():
                answer = await self._chats.open(caller(request), asked.call)
        headers = request_id(asked.call.rid) | self._ignored.report(ignored)
        token_bytes = self._manager.tokenizer.token_bytes
        response = ChatResponse(asked, self._args.served_model_name, self._chats.parsers, token_bytes)
        if asked.call.stream:
            return EventStream(answer.answer, response.chunks(answer), headers, self._manager.metrics.call_refused)
        with CHAT_NAMES.translated(), answer.answer:
            updates = await until_disconnect(request.receive, answer.outputs())
        if updates is None:
            return client_gone()
        size = size_of([output for output, _ in updates])
        return await json_answer(lambda: response.whole(updates), size, headers)
