"""Large bodies share the room of the largest one."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from starlette.requests import Request

from baton.entrypoints.http.wire import bodies
from baton.entrypoints.http.wire.bodies import SMALL, Bodies, ClientLeft, Room, parsed
from baton.entrypoints.http_statuses import status_of
from baton.scheduler.outcome import RequestRefused

LARGEST = 4 * 2**20


def request(*pieces: bytes | None, length: int | None = None) -> Request:
    """None: the client goes away."""
    messages: list[dict[str, Any]] = [
        {"type": "http.disconnect"}
        if piece is None
        else {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
        for number, piece in enumerate(pieces, 1)
    ]
    waiting = iter(messages)

    async def receive() -> Any:
        return next(waiting)

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    return Request({"type": "http", "headers": headers}, receive)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def test_body_is_assembled_from_chunks() -> None:
    async def body() -> None:
        async with Bodies(LARGEST).json_object(request(b'{"a"', b": 1", b"}")) as fields:
            assert fields == {"a": 1}
        async with Bodies(LARGEST).settings(request()) as fields:
            assert fields == {}
        with pytest.raises(ClientLeft):
            async with Bodies(LARGEST).binary(request(b"a", None)):
                pass

    run(body())


@pytest.mark.parametrize(("length", "on_the_loop"), [(SMALL, True), (SMALL + 1, False), (None, False)])
def test_only_small_bodies_are_parsed_on_the_event_loop(length: int | None, on_the_loop: bool) -> None:
    thread = run(parsed(request(length=length), threading.current_thread))
    assert (thread is threading.current_thread()) == on_the_loop


@pytest.mark.parametrize("length", [LARGEST + 1, None])
def test_oversized_body_is_refused(length: int | None) -> None:
    async def body() -> None:
        reader = Bodies(LARGEST)
        with pytest.raises(RequestRefused, match="--max-body-mb") as caught:
            async with reader.binary(request(b"x" * LARGEST, b"x", length=length)):
                pass
        assert status_of(caught.value) == 413
        assert reader._room.free == LARGEST

    run(body())


@pytest.mark.parametrize("declared", [True, False])
def test_large_bodies_wait_for_room_and_small_ones_do_not(declared: bool) -> None:
    async def body() -> None:
        reader = Bodies(LARGEST)
        large = [b"x" * (LARGEST // 2), b"x" * (LARGEST // 2 - 1), b"x"]
        length = LARGEST if declared else None
        async with reader.binary(request(*large, length=length)) as first:
            assert len(first) == LARGEST
            second = asyncio.create_task(read(reader, request(*large, length=length)))
            async with reader.binary(request(b"x" * SMALL, length=SMALL)) as small:
                assert len(small) == SMALL
            await asyncio.sleep(0)
            assert not second.done()
        assert await second == LARGEST
        assert reader._room.free == LARGEST

    run(body())


async def read(reader: Bodies, sent: Request) -> int:
    async with reader.binary(sent) as body:
        return len(body)


def test_waiting_for_body_room_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_WAIT_S", 0.01)

    async def body() -> None:
        reader = Bodies(LARGEST)
        async with reader.binary(request(b"x" * LARGEST, length=LARGEST)):
            with pytest.raises(RequestRefused, match="memory for large bodies") as caught:
                await read(reader, request(b"x" * LARGEST, length=LARGEST))
            assert status_of(caught.value) == 503 and caught.value.code == "overloaded"
        assert reader._room.free == LARGEST

    run(body())


def test_body_room_is_granted_in_order_and_returned() -> None:
    async def body() -> None:
        room = Room(10)
        await room.take_bytes(6, 1)
        got: list[str] = []

        async def take(name: str, size: int) -> None:
            await room.take_bytes(size, 5)
            got.append(name)

        tasks = [asyncio.create_task(take(name, size)) for name, size in (("large", 10), ("small", 2), ("gone", 3))]
        await asyncio.sleep(0.01)
        assert got == [], "who comes later does not overtake"
        tasks[0].cancel()
        await asyncio.sleep(0.01)
        assert got == ["small"]
        room.give_back(6)
        tasks[2].cancel()  # in the same turn in which it is served
        await asyncio.gather(*tasks, return_exceptions=True)
        assert room.free == 8

    run(body())
