"""HTTP on bare connections: with 64 requests at once a general HTTP client would take most of the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from benchmarks.common.clients import Call, NativeClient, Reply, native_fields, native_reply


class Connections:
    """HTTP/1.1 connections to one server, without TLS. They are kept, or new for each request, since llama.cpp's server
    closes those that are idle."""

    def __init__(self, url: str, api_key: str = "", *, kept: bool = True) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{url} is no http://host:port")
        self._address = parts.hostname, parts.port or 80
        self._kept = kept
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()

    async def post(self, path: str, fields: dict[str, Any]) -> AsyncIterator[bytes]:
        """The body of the answer as it comes. Raises RuntimeError if it is not 200."""
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(*self._address)
        try:
            body = msgspec.json.encode(fields)
            head = f"POST {path} HTTP/1.1\r\nHost: {self._address[0]}\r\n{self._authorization}"
            head += "" if self._kept else "Connection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines if ": " in line)
            if status.split()[1] != "200":
                reason = await reader.readexactly(int(headers.get("content-length", 0)))
                raise RuntimeError(f"{path} answered {status}: {reason.decode()[:500]}")
            if "content-length" in headers:
                yield await reader.readexactly(int(headers["content-length"]))
            else:
                while size := int(await reader.readline(), 16):
                    yield (await reader.readexactly(size + 2))[:-2]
                await reader.readline()
        except BaseException:
            writer.close()
            raise
        if self._kept:
            self._idle.append((reader, writer))
        else:
            writer.close()

    async def events(self, path: str, fields: dict[str, Any]) -> AsyncIterator[bytes]:
        """The data of each server-sent event, [DONE] left out."""
        rest = b""
        async for part in self.post(path, fields):
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data != event and data != b"[DONE]":
                    yield data


class BareClient(NativeClient):
    """Generation over `Connections`; everything else as its base."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        super().__init__(url, api_key, timeout_s)
        self._connections = Connections(url, api_key)

    async def close(self) -> None:
        self._connections.close()
        await super().close()

    async def answer(self, fields: dict[str, Any]) -> Any:
        return msgspec.json.decode(b"".join([part async for part in self._connections.post("/generate", fields)]))

    async def send_call(self, call: Call) -> Reply:
        fields = native_fields(call)
        started, first = time.perf_counter(), None
        if not call.stream:
            return native_reply(await self.answer(fields), started, first)
        last = b""
        async for event in self._connections.events("/generate", fields):
            first, last = first or time.perf_counter(), event
        return native_reply(msgspec.json.decode(last), started, first)
