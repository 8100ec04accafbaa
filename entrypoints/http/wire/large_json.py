"""Encodes and sends large JSON answers without holding up the loop: in a thread, piece by piece, as fast as the client
reads. A piece is small, because the encoder holds the GIL while it works on one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....runtime.answer import Output, TokenLogprob
from .transport import JSONAnswer

LARGE = 20_000
"""Estimated values and characters; smaller answers are encoded on the loop, within a millisecond."""

_PIECE = 5_000
_SENT_BYTES = 256 * 1024


async def json_answer(build: Callable[[], Any], size: int, headers: dict[str, str] | None = None) -> Response:
    """The answer that ``build`` makes; an iterator stands for a list, of which one element is held at a time.

    size: an estimate of the numbers and characters in it; a large one is built and encoded in a thread.
    """
    if size <= LARGE:
        content = build()
        return JSONAnswer(list(content) if isinstance(content, Iterator) else content, headers=headers)
    return _Pieces(await asyncio.to_thread(lambda: list(encode_pieces(build()))), headers)


def size_of(outputs: list[Output]) -> int:
    """The estimate for an answer of these outputs."""

    def logprobs(rows: list[TokenLogprob]) -> int:
        return len(rows) * (3 + 3 * len(rows[-1].top or ())) if rows else 0

    return sum(
        len(each.text) + len(each.token_ids) + logprobs(each.input_logprobs) + logprobs(each.output_logprobs)
        for each in outputs
    )


def encode_pieces(content: Any) -> Iterator[bytes]:
    """JSON of ``content``, as the encoder would write it at once."""
    if isinstance(content, Iterator):
        before = b"["
        for element in content:
            yield before
            yield from encode_pieces(element)
            before = b","
        yield b"]" if before == b"," else b"[]"
    elif isinstance(content, dict):
        before = b"{"
        for name, value in content.items():
            yield before + msgspec.json.encode(name) + b":"
            yield from encode_pieces(value)
            before = b","
        yield b"}" if content else b"{}"
    elif isinstance(content, list) and content:
        yield from _list_pieces(content)
    else:
        yield msgspec.json.encode(content)


def _list_pieces(content: list) -> Iterator[bytes]:
    before, at = b"[", 0
    while at < len(content):
        yield before
        before = b","
        if isinstance(content[at], dict):
            yield from encode_pieces(content[at])
            at += 1
            continue
        # Neighbours are alike: rows of logprobs, numbers, texts.
        width = len(content[at]) if isinstance(content[at], list | str) else 1
        until = at + max(1, _PIECE // max(1, width))
        yield msgspec.json.encode(content[at:until])[1:-1]
        at = until
    yield b"]"


class _Pieces(Response):
    """Sends encoded pieces, each once the client has taken the ones before it."""

    media_type = "application/json"

    def __init__(self, pieces: list[bytes], headers: dict[str, str] | None) -> None:
        super().__init__(headers={**(headers or {}), "Content-Length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._pieces.reverse()
        while self._pieces:
            ready = bytearray()
            while self._pieces and len(ready) < _SENT_BYTES:
                ready += self._pieces.pop()
            await send({"type": "http.response.body", "body": bytes(ready), "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
