"""OpenAI's endpoints, under ``/v1``."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ....runtime.tokenizer_manager import TokenizerManager
from ...description.json_schema import COUNT, answered, enum, list_of, nullable, string
from ...description.operation import GENERATING, Operation
from ...fields.ignored import Ignored
from ...fields.jobs import JOB_HEADERS
from ...fields.prompts import with_extra_body
from ...fields.reading import check_model
from ...openai.completion_response import ANSWER, CHUNK, CompletionResponse
from ...openai.completions import BODY, COMPLETION_NAMES, EXAMPLES, CompletionRequest, parse_completion
from ...server_config import ServerArgs
from ..keys import caller
from ..route import GET, POST, Route
from ..wire.answers import JSONAnswer, client_gone, json_answer, size_of, until_disconnect
from .calls import GenerationCalls

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
    body=with_extra_body(BODY),
    headers=JOB_HEADERS,
    examples=EXAMPLES,
    answer=ANSWER,
    events=CHUNK,
    refusals=GENERATING,
)


class OpenAIRoutes:
    def __init__(self, manager: TokenizerManager, args: ServerArgs, calls: GenerationCalls) -> None:
        self._manager = manager
        self._args = args
        self._calls = calls
        self._started = int(time.time())
        self.routes = [
            Route("/v1/models", self.models, GET, operation=_MODELS),
            Route("/v1/models/{model:path}", self.model, GET, operation=_ONE_MODEL),
            Route("/v1/completions", self.completions, POST, operation=_COMPLETE),
        ]

    async def models(self) -> Response:
        name = self._args.served_model_name
        return JSONAnswer(
            {"object": "list", "data": [self._model()], "has_more": False, "first_id": name, "last_id": name}
        )

    async def model(self, model: str) -> Response:
        """The one model, by its name, which may have slashes."""
        if not self._args.server.serve_any_model_name:
            check_model(model, self._args.served_model_name)
        return JSONAnswer(self._model())

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
            response = CompletionResponse(call, self._calls.model, self._manager.tokenizer)
            with COMPLETION_NAMES.translated():
                answer = await self._manager.open_answer(caller(request), batch.prompts, stream=batch.stream)
        if batch.stream:
            return self._calls.stream_answer(answer, response.chunks(answer.updates()), headers)
        with COMPLETION_NAMES.translated(), answer:
            outputs = await until_disconnect(request.receive, answer.outputs())
        if outputs is None:
            return client_gone()
        return await json_answer(lambda: response.whole(outputs), size_of(outputs), headers)

    def _parse_completion(self, fields: dict[str, Any], rid: str | None, ignored: Ignored) -> CompletionRequest:
        calls = self._calls
        return parse_completion(
            fields, rid=rid, max_prompts=calls.max_prompts, defaults=calls.defaults, ignored=ignored
        )
