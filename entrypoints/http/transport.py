"""Between the socket and the routes: bodies with a size limit, JSON, server-sent events, errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...runtime.answer import Answer
from ...scheduler.outcome import RequestRefused

T = TypeVar("T")

_DRAIN_S = 2.0
"""Seconds to go on reading and dropping the rest of a body that is too large. Closing a connection on unread data
resets it, and many clients then never see the answer."""

_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error",
    413: "request_too_large",
}  # fmt: skip


CLIENT_CLOSED_REQUEST = 499


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
            "message": error.message,
            "type": _ERROR_TYPES.get(error.status, kind),
            "code": error.code,
            "param": error.param,
        }
    }


def answer_error(error: RequestRefused, headers: dict[str, str] | None = None) -> JSONAnswer:
    headers = dict(headers or {})
    if error.status == 413:
        headers["Connection"] = "close"
    if error.status == 503:
        headers["Retry-After"] = "1"
    return JSONAnswer(error_body(error), status_code=error.status, headers=headers)


def client_gone() -> Response:
    """For a client that left before its answer; only logs show it."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def request_id(rid: str) -> dict[str, str]:
    """The header that names the request; empty if the rid does not fit in a header."""
    return {"X-Request-Id": rid} if rid.isascii() and rid.isprintable() else {}


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The request's body, which must be a JSON object. Raises RequestRefused (400, 413)."""
    body = await _read_body(request, max_bytes)
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefused(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(decoded, dict):
        raise RequestRefused("the body must be a JSON object", code="invalid_json")
    return decoded


async def read_settings(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body of a request that needs none: its JSON object, or {}. Raises RequestRefused (400, 413)."""
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return {}
    return await read_json_object(request, max_bytes)


async def read_binary(request: Request, max_bytes: int) -> bytes:
    """The request's body, whatever it is. Raises RequestRefused (413)."""
    return await _read_body(request, max_bytes)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = declared.isdecimal() and int(declared) > max_bytes
    chunks: list[bytes] = []
    size = 0
    if not too_large:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                too_large = True
                break
            chunks.append(chunk)
    if too_large:
        chunks.clear()
        if request.headers.get("expect", "").lower() != "100-continue":
            await _drain(request)
        shown = f"{declared} bytes" if declared else "larger"
        raise RequestRefused(
            f"the body is {shown}; at most {max_bytes} bytes are taken. Split the batch or raise --max-body-mb",
            status=413,
            code="body_too_large",
        )
    return b"".join(chunks)


async def _drain(request: Request) -> None:
    deadline = time.monotonic() + _DRAIN_S
    while time.monotonic() < deadline:
        try:
            message = await asyncio.wait_for(request.receive(), deadline - time.monotonic())
        except TimeoutError:
            return
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


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


class EventStream(Response):
    """Sends an answer's ``events`` as server-sent events: ``data: {...}`` for each, ``data: [DONE]`` at the end.

    The status line waits for the first event, so that a request refused by the worker still gets its proper status; a
    later error becomes an event. A client that reads slowly gets fewer, larger events. If it leaves, the answer is
    aborted.
    """

    def __init__(
        self,
        answer: Answer,
        events: AsyncIterator[dict],
        headers: dict[str, str],
        count_error: Callable[[int], None],
    ) -> None:
        """count_error: told the status of an error that comes when the status line has been sent."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", **headers})
        # The length is unknown; Response has set that of its empty body.
        del self.headers["content-length"]
        self._answer = answer
        self._events = events
        self._count_error = count_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._answer:
            await until_disconnect(receive, self._send_events(scope, receive, send))

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_event(data: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                await send(start)
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        try:
            async for event in self._events:
                await send_event(msgspec.json.encode(event))
        except RequestRefused as error:
            if not started:
                await answer_error(error)(scope, receive, send)
                return
            self._count_error(error.status)
            await send_event(msgspec.json.encode(error_body(error)))
        await send_event(b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
