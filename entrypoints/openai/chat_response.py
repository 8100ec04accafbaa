"""Turns the answer to a chat into OpenAI's objects: one whole response, or the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from ...runtime.answer import Output, TokenLogprob
from ...runtime.text.token_bytes import TokenBytes
from ..chat.answer_parsers import AnswerParsers
from ..chat.chats import ChatAnswer, ChatUpdate
from ..description.json_schema import IDS, Properties, answered, enum, list_of, nullable, number, string, whole
from ..fields.output_details import RID_AND_INDEX, STAGE_DETAILS, stage_details
from ..tool_parsers.pieces import CallArguments, CallBegins, Piece, Reasoning
from .chat import CHAT_NAMES, ChatRequest
from .common import FINISH_REASONS, MATCHED_STOP, NULLABLE_TEXT, PROMPT_LOGPROBS, USAGE, prompt_logprobs, usage


class ChatResponse:
    """Builds the response to one request."""

    def __init__(self, request: ChatRequest, model: str, parsers: AnswerParsers, token_bytes: TokenBytes) -> None:
        """``model``: the served name."""
        self._request = request
        self._head = {"id": request.response_id, "created": int(time.time()), "model": model}
        self._parsers = parsers
        self._token_bytes = token_bytes
        self._newest: dict[int, Output] = {}
        self._begun: set[int] = set()
        self._called: set[int] = set()
        """Samples with a call in their answer."""

    def whole(self, updates: list[ChatUpdate]) -> dict:
        """The response to a request that does not stream, from all its outputs; where lists may be long there are
        iterators."""
        choices = [self._choice(*update) for update in updates]
        head = {"object": "chat.completion", **self._head}
        head |= self._of_prompt(updates[0].output, iter)
        return {**head, "choices": choices, "usage": usage(output for output, _ in updates)}

    async def chunks(self, answer: ChatAnswer) -> AsyncIterator[dict]:
        """The events of a stream. Raises RequestRefused with OpenAI's field names."""
        head = {"object": "chat.completion.chunk", **self._head}
        extra = {"usage": None} if self._request.include_usage else {}
        with CHAT_NAMES.translated():
            async for update in answer.updates():
                of_prompt = self._of_prompt(update.output, list) if not self._newest else {}
                for choice in self._deltas(*update):
                    yield {**head, **of_prompt, "choices": [choice], **extra}
                    of_prompt = {}
        if self._request.include_usage:
            yield {**head, "choices": [], "usage": usage(self._newest.values())}

    def _choice(self, output: Output, pieces: list[Piece]) -> dict:
        content, reasoning, calls = _collected(pieces, self._parsers.new_call_id)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
            self._called.add(output.sample)
        return {
            "index": output.sample,
            "message": message,
            "logprobs": self._logprobs(output, iter),
            **self._token_ids(output),
            **self._end(output),
        }

    def _deltas(self, output: Output, pieces: list[Piece]) -> Iterator[dict]:
        self._newest[output.sample] = output
        logprobs, token_ids = self._logprobs(output, list), self._token_ids(output)
        deltas = [self._delta(piece) for piece in pieces]
        if output.sample not in self._begun:
            self._begun.add(output.sample)
            deltas = [{"role": "assistant", "content": ""}, *deltas]
        if any(isinstance(piece, CallBegins) for piece in pieces):
            self._called.add(output.sample)
        if not deltas and (logprobs is not None or (token_ids and output.token_ids)):
            deltas = [{"content": ""}]
        for position, delta in enumerate(deltas):
            # Its logprobs and ids come with the last: a parser may hold back text, not these.
            last = position == len(deltas) - 1
            yield {
                "index": output.sample,
                "delta": delta,
                "logprobs": logprobs if last else None,
                "finish_reason": None,
                **(token_ids if last else {}),
            }
        if output.finish is not None:
            yield {"index": output.sample, "delta": {}, "logprobs": None, **self._end(output)}

    def _delta(self, piece: Piece) -> dict[str, Any]:
        match piece:
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallBegins(index, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": self._parsers.new_call_id(), "type": "function", "function": function}
                return {"tool_calls": [call]}
            case CallArguments(index, delta):
                return {"tool_calls": [{"index": index, "function": {"arguments": delta}}]}
            case _:
                return {"content": piece.text}

    def _end(self, output: Output) -> dict[str, Any]:
        """The fields that end a choice."""
        finish = output.finish
        assert finish is not None
        reason = "tool_calls" if finish.type == "stop" and output.sample in self._called else finish.type
        details = {"rid": output.prompt.rid, "index": output.sample, **stage_details(output)}
        return {"finish_reason": reason, "matched_stop": finish.matched, "baton": details}

    def _of_prompt(self, output: Output, rows: Callable[[Iterable], Any]) -> dict[str, Any]:
        """Fields about the prompt, which all samples share."""
        told: dict[str, Any] = {}
        if self._request.token_ids:
            told["prompt_token_ids"] = rows(output.prompt_token_ids)
        if self._request.prompt_logprobs is not None:
            told["prompt_logprobs"] = rows(prompt_logprobs(output, self._request.prompt_logprobs))
        return told

    def _token_ids(self, output: Output) -> dict[str, Any]:
        return {"token_ids": output.token_ids} if self._request.token_ids else {}

    def _logprobs(self, output: Output, rows: Callable[[Iterable], Any]) -> dict | None:
        if self._request.logprobs is None or not len(output.output_logprobs):
            return None
        return {"content": rows(map(self._entry, output.output_logprobs)), "refusal": None}

    def _entry(self, token: TokenLogprob) -> dict[str, Any]:
        return {**self._alone(token), "top_logprobs": [self._alone(other) for other in token.top or ()]}

    def _alone(self, token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(self._token_bytes[token.id])}


def _collected(pieces: list[Piece], new_call_id: Callable[[], str]) -> tuple[str, str, list[dict]]:
    """(words, thoughts, calls) of a whole answer."""
    words: list[str] = []
    thoughts: list[str] = []
    calls: list[dict] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        match piece:
            case Reasoning(text):
                thoughts.append(text)
            case CallBegins(_, name):
                calls.append({"id": new_call_id(), "type": "function", "function": {"name": name}})
                arguments.append([])
            case CallArguments(_, delta):
                arguments[-1].append(delta)
            case _:
                words.append(piece.text)
    for call, parts in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(parts)
    return "".join(words), "".join(thoughts), calls


# -- as /openapi.json describes it -------------------------------------------------------------------------------------

_TOKEN: Properties = {"token": NULLABLE_TEXT, "logprob": nullable(number()), "bytes": list_of(whole("", 0, 255))}

_LOGPROBS = answered(
    {
        "content": list_of(answered({**_TOKEN, "top_logprobs": list_of(answered(_TOKEN))})),
        "refusal": {"type": "null"},
    },
    title="ChatLogprobs",
)

_CALL = answered(
    {
        "id": string(),
        "type": enum("function"),
        "function": answered({"name": string(), "arguments": string("JSON, as far as the model wrote it well.")}),
    }
)

_CALL_DELTA = answered(
    {"index": whole("", 0), "function": answered({"arguments": string()}, optional={"name": string()})},
    optional={"id": string(), "type": enum("function")},
)

_END: Properties = {
    "finish_reason": enum("tool_calls", *FINISH_REASONS),
    "matched_stop": MATCHED_STOP,
    "baton": answered(RID_AND_INDEX, title="ChatDetails", optional=STAGE_DETAILS),
}

_CHOICE = answered(
    {
        "index": whole("", 0),
        "message": answered(
            {"role": enum("assistant"), "content": NULLABLE_TEXT, "refusal": {"type": "null"}},
            title="ChatAnswer",
            optional={"reasoning_content": string(), "tool_calls": list_of(_CALL)},
        ),
        "logprobs": nullable(_LOGPROBS),
        **_END,
    },
    title="ChatChoice",
    optional={"token_ids": IDS},
)

_DELTA = answered(
    {},
    title="ChatDelta",
    optional={
        "role": enum("assistant"),
        "content": string(),
        "reasoning_content": string(),
        "tool_calls": list_of(_CALL_DELTA),
    },
)

_CHUNK_CHOICE = answered(
    {
        "index": whole("", 0),
        "delta": _DELTA,
        "logprobs": nullable(_LOGPROBS),
        "finish_reason": enum("tool_calls", *FINISH_REASONS, None),
    },
    optional={"matched_stop": MATCHED_STOP, "baton": _END["baton"], "token_ids": IDS},
)

_HEAD: Properties = {"id": string("chatcmpl-, and the rid."), "created": whole("Unix time.", 0), "model": string()}

ANSWER = answered(
    {"object": enum("chat.completion"), **_HEAD, "choices": list_of(_CHOICE), "usage": USAGE},
    title="ChatCompletion",
    optional={"prompt_token_ids": IDS, "prompt_logprobs": PROMPT_LOGPROBS},
)
CHUNK = answered(
    {"object": enum("chat.completion.chunk"), **_HEAD, "choices": list_of(_CHUNK_CHOICE)},
    title="ChatCompletionChunk",
    optional={"usage": nullable(USAGE), "prompt_token_ids": IDS},
)
