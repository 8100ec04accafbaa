"""Request bodies: how many bytes they may have, how many may be held at the same time, and JSON. `connection.py`
watches how long they take."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request

from ....scheduler.outcome import RequestRefused
from ...fields.jobs import with_extras
from .json_body import decode_object

SMALL = 64 * 1024
"""Bytes. Bodies up to this size never wait for room."""

_STEP = 2**20
"""Bytes by which a body of unknown length asks for more room."""

_WAIT_S = 30.0
"""Seconds that a body waits for room."""


class ClientLeft(Exception):
    """The connection ended before the body was complete, so there is no client to answer."""


T = TypeVar("T")


class Bodies:
    """Reads the bodies of one server's requests. Large bodies share a budget of ``max_bytes``; a body that exceeds what
    is left waits, unread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._room = Room(max_bytes)

    @asynccontextmanager
    async def json_object(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """The body, which must be a JSON object; its room is kept for the ``with`` block. Raises RequestRefused (400,
        413, 503) and ClientLeft."""
        async with self.binary(request) as body:
            yield await decode_object(body)

    @asynccontextmanager
    async def generation(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """As `json_object`, for requests that generate: with fields from headers and ``extra_body`` (`with_extras`)."""
        async with self.json_object(request) as fields:
            yield with_extras(fields, request.headers)

    @asynccontextmanager
    async def settings(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """The JSON object of a request that needs none: {} if there is no body."""
        if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
            yield {}
            return
        async with self.json_object(request) as fields:
            yield fields

    @asynccontextmanager
    async def binary(self, request: Request) -> AsyncIterator[bytearray]:
        """The body as it is, for the ``with`` block, which may clear it. Raises RequestRefused (413, 503) and
        ClientLeft."""
        declared = request.headers.get("content-length", "")
        held = _Held(self._room)
        try:
            if declared.isdecimal():
                if int(declared) > self._max_bytes:
                    raise self._too_large(f"{declared} bytes")
                if int(declared) > SMALL:
                    await held.at_least(int(declared))
            yield await self._read(request, held)
        finally:
            held.give_back()

    async def _read(self, request: Request, held: _Held) -> bytearray:
        body = bytearray()
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                raise self._too_large("larger")
            if not message.get("more_body", False):
                return body
            if len(body) > max(SMALL, held.size):
                await held.at_least(min(len(body) + _STEP, self._max_bytes))

    def _too_large(self, shown: str) -> RequestRefused:
        return RequestRefused(
            f"the body is {shown}; the maximum is {self._max_bytes} bytes. Split the batch or raise --max-body-mb",
            code="body_too_large",
        )


async def parsed(request: Request, parse: Callable[[], T]) -> T:
    """The result of ``parse``, which reads the body of this request: in a thread, unless the body is small."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) <= SMALL:
        return parse()
    return await asyncio.to_thread(parse)


class Room:
    """A budget of bytes that bodies may hold at the same time, granted in order of request."""

    def __init__(self, size: int) -> None:
        self.free = size
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take_bytes(self, size: int, timeout_s: float) -> None:
        """Wait for ``size`` bytes. Raises RequestRefused (503) when the time is over."""
        if not self._waiting and size <= self.free:
            self.free -= size
            return
        mine = (size, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        try:
            async with asyncio.timeout(timeout_s):
                await mine[1]
        except TimeoutError:
            raise RequestRefused(
                "other requests use all the memory for large bodies; try again soon", code="overloaded"
            ) from None
        except asyncio.CancelledError:
            if mine not in self._waiting and not mine[1].cancelled():
                self.give_back(size)  # it had been served in the same turn
            raise
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
                self._serve()

    def give_back(self, size: int) -> None:
        self.free += size
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.free:
            size, future = self._waiting.popleft()
            if not future.done():
                self.free -= size
                future.set_result(None)


class _Held:
    """The bytes of the room that one body holds."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.size = 0

    async def at_least(self, size: int) -> None:
        await self._room.take_bytes(size - self.size, _WAIT_S)
        self.size = size

    def give_back(self) -> None:
        self._room.give_back(self.size)
        self.size = 0
