"""Routes of the tokenizer: text to ids and back."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from starlette.responses import Response

from ...runtime.text.prompt_tokenizer import MAX_TOKENS_OF_CALL
from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import RequestRefused
from ..chat.chats import Chats
from ..description.json_schema import COUNT, IDS, answered, either, flag, list_of, nullable, string, taken
from ..description.openapi import Operation
from ..fields.reading import MODEL, refuse_unserved
from ..openai.chat import CHAT_NAMES, PROPERTIES, parse_chat
from .model_names import ModelNames
from .route import POST, Route
from .wire.answers import json_answer
from .wire.bodies import Bodies

_CHAT_FIELDS = (
    "messages", "prompt", "model", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "documents", "reasoning_effort",
)  # fmt: skip
_CHAT_OFF: dict[str, tuple] = {"add_special_tokens": (False,), "chat_template": (), "mm_processor_kwargs": ({},)}

_TEXTS = either(string(), list_of(string()))
_TOKENIZE = Operation(
    summary="Text, or a chat, to token ids",
    tag="Tokenizer",
    body=taken(
        {
            "prompt": either(string(), list_of(string()), about="A text or a list; or give `messages`."),
            "add_special_tokens": flag("Of a text; a chat's come from its template.", default=True),
            "return_token_strs": flag(default=False),
            "model": MODEL,
            **{name: PROPERTIES[name] for name in _CHAT_FIELDS if name not in ("prompt", "model")},
        },
        title="TokenizeBody",
        unsupported={name: off for name, off in _CHAT_OFF.items() if name != "add_special_tokens"},
    ),
    answer=answered(
        {
            "tokens": either(IDS, list_of(IDS)),
            "count": either(COUNT, list_of(COUNT)),
            "max_model_len": nullable(COUNT),
            "token_strs": nullable(either(list_of(string()), list_of(list_of(string())))),
        },
        title="Tokenized",
    ),
    refusals=(404,),
)
_DETOKENIZE = Operation(
    summary="Token ids to text",
    tag="Tokenizer",
    body=taken(
        {"tokens": either(IDS, list_of(IDS)), "skip_special_tokens": flag(default=True), "model": MODEL},
        title="DetokenizeBody",
        required=("tokens",),
    ),
    answer=answered({"text": _TEXTS, "prompt": _TEXTS}, title="Detokenized"),
    refusals=(404,),
)


class TokenizerRoutes:
    def __init__(self, manager: TokenizerManager, chats: Chats, models: ModelNames, bodies: Bodies) -> None:
        self._manager = manager
        self._chats = chats
        self._models = models
        self._bodies = bodies
        self.routes = [
            Route("/tokenize", self.tokenize, POST, operation=_TOKENIZE),
            Route("/v1/tokenize", self.tokenize, POST, operation=_TOKENIZE),
            Route("/detokenize", self.detokenize, POST, operation=_DETOKENIZE),
            Route("/v1/detokenize", self.detokenize, POST, operation=_DETOKENIZE),
        ]

    async def tokenize(self, request: Request) -> Response:
        async with self._bodies.json_object(request) as fields:
            with_texts = _boolean(fields, "return_token_strs", default=False)
            fields.pop("return_token_strs", None)
            if fields.get("messages") is not None:
                is_list, tokens = False, [await self._tokens_of_chat(fields)]
            else:
                is_list, tokens = await self._tokens_of_prompt(fields)
        return await json_answer(lambda: self._answer(tokens, is_list, with_texts), sum(map(len, tokens)))

    async def _tokens_of_prompt(self, fields: dict[str, Any]) -> tuple[bool, list[list[int]]]:
        """(is it a list of prompts, the tokens of each)."""
        refuse_unserved(fields, ("prompt", "add_special_tokens", "model"))
        self._models.check(fields.get("model"))
        prompt = fields.get("prompt")
        is_list = isinstance(prompt, list)
        texts: list[Any] = prompt if is_list else [prompt]
        if not all(isinstance(text, str) for text in texts):
            raise RequestRefused("prompt takes a string or a list of strings", param="prompt")
        special = _boolean(fields, "add_special_tokens", default=True)
        return is_list, await self._manager.tokenize(texts, add_special_tokens=special)

    async def _tokens_of_chat(self, fields: dict[str, Any]) -> list[int]:
        """The tokens of the prompt that /v1/chat/completions would make of these messages."""
        refuse_unserved(fields, _CHAT_FIELDS, _CHAT_OFF)
        if fields.pop("prompt", None) is not None:
            raise RequestRefused("prompt and messages are both given; give one of them", param="prompt")
        fields.pop("add_special_tokens", None)  # the template writes them
        asked = parse_chat(fields)
        self._models.check(asked.model)
        with CHAT_NAMES.translated():
            return await self._chats.render(asked.call)

    def _answer(self, tokens: list[list[int]], is_list: bool, with_texts: bool) -> dict[str, Any]:
        """In the shape of vLLM, which SGLang's has in it. token_strs: the text of each token, if asked for."""
        text = self._manager.tokenizer.token_text
        texts = [list(map(text, ids)) for ids in tokens] if with_texts else None
        return {
            "tokens": tokens if is_list else tokens[0],
            "count": [len(ids) for ids in tokens] if is_list else len(tokens[0]),
            "max_model_len": self._manager.worker_info.get("context_length"),
            "token_strs": texts if texts is None or is_list else texts[0],
        }

    async def detokenize(self, request: Request) -> Response:
        async with self._bodies.json_object(request) as fields:
            refuse_unserved(fields, ("tokens", "skip_special_tokens", "model"))
            self._models.check(fields.get("model"))
            tokens = fields.get("tokens")
            if not isinstance(tokens, list):
                raise RequestRefused("tokens takes a list of token ids, or a list of such lists", param="tokens")
            is_list = bool(tokens) and all(isinstance(item, list) for item in tokens)
            skip = _boolean(fields, "skip_special_tokens", default=True)
            texts = await asyncio.to_thread(self._decode, tokens if is_list else [tokens], skip)
        # SGLang's name, and vLLM's.
        text = texts if is_list else texts[0]
        return await json_answer(lambda: {"text": text, "prompt": text}, 2 * sum(map(len, texts)))

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
