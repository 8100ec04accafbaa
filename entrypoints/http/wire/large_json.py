"""Encodes and sends large JSON answers without holding up the loop: in a thread, piece by piece, as fast as the client
reads. A piece is small, because the encoder holds the GIL while it works on one. Nothing holds the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....runtime.answer import Output
from .transport import until_disconnect

LARGE = 20_000
"""Estimated values and characters; smaller answers are encoded on the loop, within a millisecond."""

_PIECE = 5_000
_SENT_BYTES = 64 * 1024


async def json_answer(build: Callable[[], Any], size: int, headers: dict[str, str] | None = None) -> Response:
    """The answer that ``build`` makes; an iterator stands for a list, of which some elements are held at a time.

    size: an estimate of the numbers and characters in it; a large one is built and encoded in a thread, and sent
    without its length.
    """
    if size <= LARGE:
        return Response(msgspec.json.encode(build(), enc_hook=list), headers=headers, media_type="application/json")
    return _Pieces(encode_pieces(await asyncio.to_thread(build)), headers)


def size_of(outputs: list[Output]) -> int:
    """The estimate for an answer of these outputs."""
    return sum(
        len(each.text)
        + len(each.token_ids)
        + len(each.prompt_ids) // 4
        + 3 * (each.input_logprobs.num_entries + each.output_logprobs.num_entries)
        for each in outputs
    )


def encode_pieces(content: Any) -> Iterator[bytes]:
    """JSON of ``content``, as the encoder would write it at once."""
    if isinstance(content, dict):
        before = b"{"
        for name, value in content.items():
            yield before + msgspec.json.encode(name) + b":"
            yield from encode_pieces(value)
            before = b","
        yield b"}" if content else b"{}"
    elif isinstance(content, list | Iterator):
        yield from _list_pieces(iter(content))
    else:
        yield msgspec.json.encode(content)


def _list_pieces(elements: Iterator) -> Iterator[bytes]:
    before = b"["
    for first in elements:
        yield before
        before = b","
        if first is None or isinstance(first, dict):
            yield from encode_pieces(first)
            continue
        # Neighbours are alike: rows of logprobs, numbers, texts.
        width = len(first) if isinstance(first, list | str) else 1
        yield msgspec.json.encode([first, *islice(elements, _PIECE // max(1, width))])[1:-1]
    yield b"]" if before == b"," else b"[]"


class _Pieces(Response):
    """Encodes pieces and sends them, each once the client has taken the ones before it."""

    media_type = "application/json"

    def __init__(self, pieces: Iterator[bytes], headers: dict[str, str] | None) -> None:
        super().__init__(headers=headers)
        # The length is unknown; Response has set that of its empty body.
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while ready := await asyncio.to_thread(self._next):
            await send({"type": "http.response.body", "body": ready, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _next(self) -> bytes:
        ready = bytearray()
        for piece in self._pieces:
            ready += piece
            if len(ready) >= _SENT_BYTES:
                break
        return bytes(ready)
