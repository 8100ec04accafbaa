"""OpenAI's models, completions and chats, under ``/v1``; `responses_routes` has its responses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ..chat.chats import Chats
from ..description.json_schema import COUNT, answered, enum, list_of, nullable, string
from ..description.openapi import GENERATING, Operation
from ..fields.conversation_names import ConversationNames
from ..fields.ignored import Ignored
from ..fields.jobs import JOB_HEADERS
from ..fields.prompts import with_extra_body
from ..openai import chat, chat_response, completion_response, completions
from ..server_config import ServerArgs
from .generation_calls import GenerationCalls
from .keys import caller
from .model_names import ModelNames
from .route import GET, POST, Route
from .wire.answers import JSONAnswer, client_gone, json_answer, size_of, until_disconnect

_MODEL = answered(
    {
        "id": string("The served name."),
        "object": enum("model"),
        "created": COUNT,
        "owned_by": string(),
        "root": string("The model's folder."),
        "max_model_len": nullable(COUNT),
        "type": enum("model"),
        "display_name": string(),
        "created_at": string("RFC 3339."),
        "max_input_tokens": nullable(COUNT),
        "max_tokens": nullable(COUNT),
    },
    title="Model",
)
"""OpenAI's fields, then those of Anthropic: clients of both ask here."""
_MODELS = Operation(
    summary="The one model, in a list",
    tag="OpenAI",
    answer=answered(
        {
            "object": enum("list"),
            "data": list_of(_MODEL),
            "has_more": enum(False),
            "first_id": string(),
            "last_id": string(),
        },
        title="Models",
    ),
)
_ONE_MODEL = Operation(summary="The one model, by its name", tag="OpenAI", answer=_MODEL, refusals=(404,))
_COMPLETE = Operation(
    summary="Complete a text",
    about="OpenAI's completions, with continuation and beam search.",
    tag="OpenAI",
    body=with_extra_body(completions.BODY),
    headers=JOB_HEADERS,
    examples=completions.EXAMPLES,
    answer=completion_response.ANSWER,
    events=completion_response.CHUNK,
    refusals=GENERATING,
)
_CHAT = Operation(
    summary="Answer a chat",
    about="OpenAI's chat completions. A longer chat continues from its cached prefix automatically.",
    tag="OpenAI",
    body=with_extra_body(chat.BODY),
    headers=JOB_HEADERS,
    examples=chat.EXAMPLES,
    answer=chat_response.ANSWER,
    events=chat_response.CHUNK,
    refusals=GENERATING,
)


class OpenAIRoutes:
    def __init__(
        self, manager: TokenizerManager, args: ServerArgs, calls: GenerationCalls, chats: Chats, models: ModelNames
    ) -> None:
        self._manager = manager
        self._args = args
        self._calls = calls
        self._chats = chats
        self._models = models
        self._started = int(time.time())
        self.routes = [
            Route("/v1/models", self.models, GET, operation=_MODELS),
            Route("/v1/models/{model:path}", self.model, GET, operation=_ONE_MODEL),
            Route("/v1/completions", self.completions, POST, operation=_COMPLETE),
            Route("/v1/chat/completions", self.chat_completions, POST, operation=_CHAT),
        ]

    async def models(self) -> Response:
        adapters = self._manager.control.adapters.described
        listed = [self._model(), *map(self._adapter, adapters)]
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]}
        return JSONAnswer({"object": "list", "data": listed, "has_more": False} | ends)

    async def model(self, model: str) -> Response:
        """The model or an adapter, by its name, which may have slashes."""
        name = self._models.find_listed(model)
        adapters = self._manager.control.adapters.described
        found = next((adapter for adapter in adapters if adapter["name"] == name), None)
        return JSONAnswer(self._model() if found is None else self._adapter(found))

    def _adapter(self, adapter: Mapping[str, Any]) -> dict[str, Any]:
        name = adapter["name"]
        more = {"id": name, "display_name": name, "root": adapter["path"], "parent": self._args.served_model_name}
        return self._model() | more

    def _model(self) -> dict[str, Any]:
        name, context_length = self._args.served_model_name, self._manager.worker_info.get("context_length")
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "root": self._args.model.model_path,
            "max_model_len": context_length,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "max_input_tokens": context_length,
            "max_tokens": context_length,
        }

    async def completions(self, request: Request) -> Response:
        async with self._calls.read_call(request, self._parse_completion) as (call, ignored):
            self._calls.check_model(call.model)
            batch, headers = call.batch, self._calls.answer_headers(call.batch.rid, ignored)
            response = completion_response.CompletionResponse(
                call, self._calls.shown_model(call.model), self._manager.tokenizer
            )
            with completions.COMPLETION_NAMES.translated():
                answer = await self._manager.open_answer(caller(request), batch.prompts, stream=batch.stream)
        if batch.stream:
            return self._calls.stream_answer(answer, response.chunks(answer.updates()), headers)
        with completions.COMPLETION_NAMES.translated(), answer:
            outputs = await until_disconnect(request.receive, answer.outputs())
        if outputs is None:
            return client_gone()
        return await json_answer(lambda: response.whole(outputs), size_of(outputs), headers)

    def _parse_completion(
        self, fields: dict[str, Any], rid: str | None, names: ConversationNames, ignored: Ignored
    ) -> completions.CompletionRequest:
        calls = self._calls
        return completions.parse_completion(
            fields, rid=rid, max_prompts=calls.max_prompts, defaults=calls.defaults, names=names, ignored=ignored
        )

    async def chat_completions(self, request: Request) -> Response:
        calls = self._calls
        async with calls.read_call(request, self._parse_chat) as (asked, ignored):
            calls.check_model(asked.model)
            with chat.CHAT_NAMES.translated():
                answer = await self._chats.open_chat(caller(request), asked.call)
        headers = calls.answer_headers(asked.call.rid, ignored)
        response = chat_response.ChatResponse(
            asked, calls.shown_model(asked.model), self._chats.parsers, self._manager.tokenizer.token_bytes
        )
        if asked.call.stream:
            return calls.stream_answer(answer.answer, response.chunks(answer), headers)
        with chat.CHAT_NAMES.translated(), answer.answer:
            updates = await until_disconnect(request.receive, answer.outputs())
        if updates is None:
            return client_gone()
        size = size_of([output for output, _ in updates])
        return await json_answer(lambda: response.whole(updates), size, headers)

    def _parse_chat(
        self, fields: dict[str, Any], rid: str | None, names: ConversationNames, ignored: Ignored
    ) -> chat.ChatRequest:
        return chat.parse_chat(fields, rid=rid, defaults=self._calls.defaults, names=names, ignored=ignored)
