"""Between the socket and the routes: bodies with a size limit, JSON, server-sent events, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....scheduler.outcome import RequestRefused

T = TypeVar("T")

_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error",
    413: "request_too_large", 429: "rate_limit_error",
}  # fmt: skip


CLIENT_CLOSED_REQUEST = 499

_MAX_MESSAGE_CHARS = 2_000
"""Many errors quote a value of the body, which may have megabytes."""


class JSONAnswer(Response):
    """JSON by msgspec. Numbers that JSON cannot express become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


ErrorBody = Callable[[RequestRefused], dict[str, Any]]
"""Makes the JSON of an error."""


def error_body(error: RequestRefused) -> dict[str, Any]:
    """The shape of errors wherever no API has one of its own."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(error.status, kind),
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
    return RequestRefused(message, status=error.status, code=error.code, param=param or None)


def answer_error(
    error: RequestRefused, headers: dict[str, str] | None = None, *, body: ErrorBody = error_body
) -> JSONAnswer:
    headers = dict(headers or {})
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    return JSONAnswer(body(_cut(error)), status_code=error.status, headers=headers)


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
            self._count_error(error.status)
            await send_piece(self._format.write(self._format.error_body(_cut(error))))
        await send_piece(self._format.end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
