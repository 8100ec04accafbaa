"""Answers: JSON, small or large, server-sent events, errors.

A large JSON answer is built and encoded in a thread, piece by piece, as fast as the client reads: the event loop keeps
turning, the encoder holds the GIL for one piece at a time, and the whole is never in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....runtime.answer import Output
from ....scheduler.outcome import RequestRefused
from ...http_statuses import status_of

T = TypeVar("T")

_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error",
    413: "request_too_large", 429: "rate_limit_error",
}  # fmt: skip


CLIENT_CLOSED_REQUEST = 499

LARGE = 20_000
"""Estimated values and characters; smaller answers are encoded on the loop, within a millisecond."""

_PIECE = 5_000
"""Values and characters that are encoded at a time."""

_SENT_BYTES = 64 * 1024

_MAX_MESSAGE_CHARS = 2_000
"""Longer messages are cut: many errors quote a value of the body, which may have megabytes."""


class JSONAnswer(Response):
    """JSON by msgspec. Numbers that JSON cannot express become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


ErrorBody = Callable[[RequestRefused], dict[str, Any]]
"""Makes the JSON of an error."""


def error_body(error: RequestRefused) -> dict[str, Any]:
    """The shape of errors wherever no API has one of its own."""
    status = status_of(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(status, kind),
            "code": error.code,
            "param": error.param,
        }
    }


def _cut(error: RequestRefused) -> RequestRefused:
    """The same with shorter texts."""
    message, param = (
        text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 3] + "..."
        for text in (error.message, error.param or "")
    )
    return RequestRefused(message, code=error.code, param=param or None)


def answer_error(
    error: RequestRefused,
    headers: dict[str, str] | None = None,
    *,
    body: ErrorBody = error_body,
    status: int | None = None,
) -> JSONAnswer:
    """status: in place of the code's own."""
    headers = dict(headers or {})
    status = status_of(error) if status is None else status
    if status in (429, 503):
        headers["Retry-After"] = "1"
    return JSONAnswer(body(_cut(error)), status_code=status, headers=headers)


def client_gone() -> Response:
    """For a client that left before its answer; only logs show it."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def request_id(rid: str) -> dict[str, str]:
    """The header that names the request; empty if the rid does not fit in a header."""
    return {"X-Request-Id": rid} if rid.isascii() and rid.isprintable() else {}


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``. If the client leaves first, cancel ``work`` and return None."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def data_event(event: dict) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def named_event(event: dict) -> bytes:
    """With its ``type`` as its name."""
    return b"event: " + event["type"].encode() + b"\n" + data_event(event)


class EventFormat(NamedTuple):
    """How an API writes its streams: each event, an error (as an event, and as the answer in place of a stream), and
    what ends them."""

    write: Callable[[dict], bytes]
    error_body: ErrorBody
    end: bytes


DATA_EVENTS = EventFormat(data_event, error_body, b"data: [DONE]\n\n")


class EventStream(Response):
    """Sends an answer's ``events`` as server-sent events, in the format of its API.

    The status line waits for the first event, so that a request refused by the worker still gets its proper status; a
    later error becomes an event. A client that reads slowly gets fewer, larger events. If it leaves, the answer is
    aborted.
    """

    def __init__(
        self,
        answer: AbstractContextManager,
        events: AsyncIterator[dict],
        headers: dict[str, str],
        count_error: Callable[[int], None],
        format: EventFormat = DATA_EVENTS,
    ) -> None:
        """answer: aborts what is unfinished when it is left. count_error: told the status of an error that comes when
        the status line has been sent."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", **headers})
        # The length is unknown; Response has set that of its empty body.
        del self.headers["content-length"]
        self._answer = answer
        self._events = events
        self._count_error = count_error
        self._format = format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._answer:
            await until_disconnect(receive, self._send_events(scope, receive, send))

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_piece(data: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                await send(start)
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            async for event in self._events:
                await send_piece(self._format.write(event))
        except RequestRefused as error:
            if not started:
                await answer_error(error, body=self._format.error_body)(scope, receive, send)
                return
            self._count_error(status_of(error))
            await send_piece(self._format.write(self._format.error_body(_cut(error))))
        await send_piece(self._format.end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


# -- large answers -----------------------------------------------------------------------------------------------------


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
