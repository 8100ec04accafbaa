"""Between the socket and the routes: bodies with a size limit, JSON, server-sent events, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, TypeVar

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


def error_body(error: RequestRefused) -> dict[str, Any]:
    """The one shape of every error, whatever the endpoint."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": _cut(error.message),
            "type": _ERROR_TYPES.get(error.status, kind),
            "code": error.code,
            "param": error.param and _cut(error.param),
        }
    }


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 3] + "..."


def answer_error(error: RequestRefused, headers: dict[str, str] | None = None) -> JSONAnswer:
    headers = dict(headers or {})
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    return JSONAnswer(error_body(error), status_code=error.status, headers=headers)


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
    """The event's ``type`` is its name as well."""
    return b"event: " + event["type"].encode() + b"\n" + data_event(event)


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends an answer's ``events`` as server-sent events, by default ``data: {...}`` for each and ``data: [DONE]`` at
    the end.

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
        *,
        encode: Callable[[dict], bytes] = data_event,
        end: bytes = DONE,
    ) -> None:
        """answer: aborts what is unfinished when it is left. count_error: told the status of an error that comes when
        the status line has been sent. end: what stands behind the last event."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", **headers})
        # The length is unknown; Response has set that of its empty body.
        del self.headers["content-length"]
        self._answer = answer
        self._events = events
        self._count_error = count_error
        self._encode = encode
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._answer:
            await until_disconnect(receive, self._send_events(scope, receive, send))

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_bytes(data: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                await send(start)
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            async for event in self._events:
                await send_bytes(self._encode(event))
        except RequestRefused as error:
            if not started:
                await answer_error(error)(scope, receive, send)
                return
            self._count_error(error.status)
            await send_bytes(data_event(error_body(error)))
        if self._end:
            await send_bytes(self._end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
