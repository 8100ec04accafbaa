"""What becomes of a page that does not read, or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from baton.entrypoints.http.dashboard import dashboard_routes
from baton.entrypoints.http.dashboard.dashboard_routes import PageStream
from baton.entrypoints.http.wire.connection import ABORT
from baton.scheduler.outcome import RequestRefused
from tests.doubles.on_a_loop import on_a_loop


class Connection:
    """``takes``: how many messages it takes before it takes no more."""

    def __init__(self, takes: int) -> None:
        self.takes = takes
        self.sent: list[Any] = []
        self.gone = asyncio.Event()
        self.aborts = 0

    async def send(self, message: Any) -> None:
        if len(self.sent) >= self.takes:
            await self.gone.wait()
        self.sent.append(message)

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def abort(self) -> None:
        self.aborts += 1
        self.gone.set()

    @property
    def scope(self) -> dict[str, Any]:
        return {"type": "http", "extensions": {ABORT: self.abort}}


class Events:
    def __init__(self, count: int = 10**9, error: RequestRefused | None = None) -> None:
        self.count, self.error = count, error
        self.made, self.closed = 0, False

    async def stream(self) -> AsyncGenerator[bytes]:
        try:
            if self.error is not None:
                raise self.error
            while self.made < self.count:
                await asyncio.sleep(0)
                self.made += 1
                yield b"event %d" % self.made
        finally:
            self.closed = True


@on_a_loop
async def test_stalled_page_is_disconnected() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dashboard_routes, "STALLED_S", 0.02)
        connection, events = Connection(takes=4), Events()
        await PageStream(events.stream())(connection.scope, connection.receive, connection.send)
    assert connection.aborts == 1 and events.closed and events.made == 4, "nothing is made that nobody takes"


@on_a_loop
async def test_page_disconnect_closes_its_events() -> None:
    connection, events = Connection(takes=10**9), Events()
    task = asyncio.create_task(PageStream(events.stream())(connection.scope, connection.receive, connection.send))
    while len(connection.sent) < 5:
        await asyncio.sleep(0)
    connection.gone.set()
    await task
    while not events.closed:
        await asyncio.sleep(0)
    assert connection.aborts == 0


@on_a_loop
async def test_finished_event_stream_ends_the_response() -> None:
    connection, events = Connection(takes=10**9), Events(count=2)
    await PageStream(events.stream())(connection.scope, connection.receive, connection.send)
    start, *pieces = connection.sent
    assert start["status"] == 200 and [piece["body"] for piece in pieces] == [b"event 1", b"event 2", b""]
    assert [piece["more_body"] for piece in pieces] == [True, True, False] and events.closed


@on_a_loop
async def test_refused_page_stream_answers_503() -> None:
    connection = Connection(takes=10**9)
    events = Events(error=RequestRefused("no room", code="too_many_streams"))
    await PageStream(events.stream())(connection.scope, connection.receive, connection.send)
    assert connection.sent[0]["status"] == 503 and b"too_many_streams" in connection.sent[1]["body"]
