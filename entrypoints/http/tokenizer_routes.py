"""Routes of the tokenizer: text to ids and back."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...runtime.text.prompt_tokenizer import MAX_TOKENS_OF_CALL
from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import RequestRefused
from ..fields.reading import check_model, refuse_unserved
from ..server_args import ServerArgs
from .route import POST, Route
from .wire.bodies import Bodies
from .wire.large_json import json_answer


class TokenizerRoutes:
    def __init__(self, manager: TokenizerManager, args: ServerArgs, bodies: Bodies) -> None:
        self._manager = manager
        self._args = args
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, POST),
            Route("/detokenize", self.detokenize, POST),
        ]

    async def tokenize(self, request: Request) -> Response:
        async with self._bodies.json_object(request) as fields:
            refuse_unserved(fields, ("prompt", "add_special_tokens", "model"), {}, (), where="")
            check_model(fields.get("model"), self._args.server.served_model_name)
            prompt = fields.get("prompt")
            is_list = isinstance(prompt, list)
            texts: list[Any] = prompt if is_list else [prompt]
            if not all(isinstance(text, str) for text in texts):
                raise RequestRefused("prompt takes a string or a list of strings", param="prompt")
            special = _boolean(fields, "add_special_tokens", default=True)
            tokens = await self._manager.tokenize(texts, add_special_tokens=special)
        answer = {
            "tokens": tokens if is_list else tokens[0],
            "count": [len(ids) for ids in tokens] if is_list else len(tokens[0]),
            "max_model_len": self._manager.worker_info.get("context_length"),
        }
        return await json_answer(lambda: answer, sum(map(len, tokens)))

    async def detokenize(self, request: Request) -> Response:
        async with self._bodies.json_object(request) as fields:
            refuse_unserved(fields, ("tokens", "skip_special_tokens", "model"), {}, (), where="")
            check_model(fields.get("model"), self._args.server.served_model_name)
            tokens = fields.get("tokens")
            if not isinstance(tokens, list):
                raise RequestRefused("tokens takes a list of token ids, or a list of such lists", param="tokens")
            is_list = bool(tokens) and all(isinstance(item, list) for item in tokens)
            skip = _boolean(fields, "skip_special_tokens", default=True)
            texts = await asyncio.to_thread(self._decode, tokens if is_list else [tokens], skip)
        return await json_answer(lambda: {"text": texts if is_list else texts[0]}, sum(map(len, texts)))

    def _decode(self, lists: list[list[Any]], skip_special_tokens: bool) -> list[str]:
        if (total := sum(map(len, lists))) > MAX_TOKENS_OF_CALL:
            raise RequestRefused(
                f"tokens holds {total} ids; send at most {MAX_TOKENS_OF_CALL} at a time", param="tokens"
            )
        # The library holds the GIL while it decodes a list.
        longest, context = max(map(len, lists), default=0), self._manager.worker_info["context_length"]
        if longest > context:
            raise RequestRefused(
                f"tokens holds a list of {longest} ids; the context has {context}: split it", param="tokens"
            )
        vocab = self._manager.tokenizer.vocab_size
        for token_id in (item for ids in lists for item in ids):
            if type(token_id) is not int or not 0 <= token_id < vocab:
                raise RequestRefused(f"tokens holds {token_id!r}; token ids go from 0 to {vocab - 1}", param="tokens")
        decode = self._manager.tokenizer.decode
        return [decode(ids, skip_special_tokens=skip_special_tokens) for ids in lists]


def _boolean(fields: dict[str, Any], name: str, *, default: bool) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestRefused(f"{name} takes true or false", param=name)
    return value
