"""Routes that pool prompts: embeddings, scores, rankings and classes. `entrypoints/pooling` decides what they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ..chat.rendering import Renderer
from ..description.json_schema import either
from ..description.openapi import GENERATING, Operation
from ..fields.conversation_names import ConversationNames
from ..fields.ignored import Ignored
from ..pooling import embeddings, scores
from ..pooling.prompts import PooledCall, PoolingTools, chat_renderer, checked_outputs
from .generation_calls import GenerationCalls
from .keys import caller
from .route import POST, Route
from .wire.answers import client_gone, json_answer, until_disconnect

_EMBED = Operation(
    summary="Embed texts",
    about="OpenAI's embeddings, with vLLM's fields. Every model embeds; its files say how prompts are pooled.",
    tag="OpenAI",
    body=embeddings.BODY,
    examples=embeddings.EXAMPLES,
    answer=embeddings.ANSWER,
    refusals=GENERATING,
)
_POOL = Operation(
    summary="Embeddings, or logits of classes",
    about="vLLM's endpoint: one vector for each prompt.",
    tag="Scores",
    body=embeddings.POOLING_BODY,
    examples=embeddings.EXAMPLES,
    answer=embeddings.POOLING_ANSWER,
    refusals=GENERATING,
)
_ENCODE = Operation(
    summary="Embed texts, or compute logits of classes",
    about="SGLang's native endpoint.",
    tag="Native",
    body=embeddings.ENCODE_BODY,
    examples={"a text": {"text": "The capital of France is Paris."}, "token ids": {"input_ids": [[1, 2], [3]]}},
    answer=embeddings.ENCODE_ANSWER,
    refusals=GENERATING,
)
_SCORE = Operation(
    summary="Score pairs of texts, or labels as the next token",
    about="vLLM's fields (text_1, text_2) or SGLang's (query, items, label_token_ids).",
    tag="Scores",
    body=scores.SCORE_BODY,
    examples=scores.SCORE_EXAMPLES,
    answer=scores.SCORE_ANSWER,
    refusals=GENERATING,
)
_RERANK = Operation(
    summary="Rank documents for a query",
    about="In the form of vLLM, Jina and Cohere.",
    tag="Scores",
    body=scores.RERANK_BODY,
    answer=scores.RERANK_ANSWER,
    refusals=GENERATING,
)
_CLASSIFY = Operation(
    summary="Classify texts",
    about="With a model that has a classification head. vLLM's fields (input), or SGLang's (text, input_ids), which "
    "are answered as by /encode.",
    tag="Scores",
    body=scores.CLASSIFY_BODY,
    answer=either(scores.CLASSIFY_ANSWER, embeddings.ENCODE_ANSWER),
    refusals=GENERATING,
)

Parse = Callable[..., PooledCall]
"""(fields, rid, max_prompts, ignored) -> the parsed request."""


class PoolingRoutes:
    def __init__(self, manager: TokenizerManager, calls: GenerationCalls, renderer: Renderer) -> None:
        """renderer: renders the chats in which a language model judges pairs of texts."""
        self._manager = manager
        self._calls = calls
        self._tools = PoolingTools(manager, calls.shown_model, chat_renderer(renderer), calls.max_prompts)
        self.routes = [
            Route("/v1/embeddings", self.embed, POST, operation=_EMBED),
            Route("/pooling", self.pool, POST, operation=_POOL),
            Route("/encode", self.encode, POST, operation=_ENCODE),
            *(Route(path, self.score, POST, operation=_SCORE) for path in ("/v1/score", "/score")),
            *(Route(path, self.rerank, POST, operation=_RERANK) for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
            *(Route(path, self.classify, POST, operation=_CLASSIFY) for path in ("/v1/classify", "/classify")),
        ]

    async def embed(self, request: Request) -> Response:
        return await self._answer(request, embeddings.parse_embeddings)

    async def pool(self, request: Request) -> Response:
        return await self._answer(request, embeddings.parse_pooling)

    async def encode(self, request: Request) -> Response:
        return await self._answer(request, embeddings.parse_encode)

    async def score(self, request: Request) -> Response:
        return await self._answer(request, scores.parse_score)

    async def rerank(self, request: Request) -> Response:
        return await self._answer(request, scores.parse_rerank)

    async def classify(self, request: Request) -> Response:
        return await self._answer(request, parse_classes)

    async def _answer(self, request: Request, parse: Parse) -> Response:
        max_prompts = self._calls.max_prompts

        def read(fields: dict[str, Any], rid: str | None, names: ConversationNames, ignored: Ignored) -> PooledCall:
            return parse(fields, rid=rid, max_prompts=max_prompts, ignored=ignored)

        async with self._calls.read_call(request, read) as (call, ignored):
            self._calls.check_model(call.fields.model)
            with call.names.translated():
                prompts = await call.make_prompts(self._tools)
                answer = await self._manager.open_answer(caller(request), prompts, stream=False)
        headers = self._calls.answer_headers(prompts[0].group or prompts[0].rid, ignored)
        with call.names.translated(), answer:
            outputs = await until_disconnect(request.receive, answer.outputs())
        if outputs is None:
            return client_gone()
        outputs = checked_outputs(outputs)
        return await json_answer(lambda: call.build_answer(outputs, self._tools), call.answer_size(outputs), headers)


def parse_classes(fields: dict[str, Any], **options: Any) -> PooledCall:
    """Fields of /classify: vLLM's, or SGLang's. Raises RequestRefused."""
    if "input" not in fields and ("text" in fields or "input_ids" in fields):
        return embeddings.parse_encode(fields, task="classify", **options)
    return scores.parse_classify(fields, **options)
