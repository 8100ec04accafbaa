"""A small HTTP/1.1 client for load tests: one connection per request, and server-sent events as they arrive.

Requests share no connections, so none waits for another's, and none is sent on one that the server has closed. A
request is timed from the moment at which its connection is open.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import SplitResult, urlsplit

_SHOWN = 300
"""Characters of an error that are shown."""


class RequestFailed(Exception):
    """A request without a complete answer. The message is one line."""


class Connections:
    """Connections to the server at base_url. A ``/v1`` at its end, as OpenAI's clients need it, is dropped."""

    def __init__(self, base_url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        """timeout_s: for answers of `fetch`. Raises ValueError unless base_url is an http:// or https:// address."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{base_url} is no address of the form http://HOST:PORT or https://HOST:PORT")
        self._parts: SplitResult = parts
        self._timeout_s = timeout_s
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._prefix}"

    async def fetch(self, method: str, path: str) -> Any:
        """The JSON of an answer with status 200. Raises RequestFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                body = b"".join([part async for part in self._exchange(method, path, b"", lambda: None)])
        except TimeoutError:
            raise RequestFailed(f"{self.url}{path}: no answer within {self._timeout_s:g} s (--timeout)") from None
        try:
            return json.loads(body)
        except ValueError:
            raise RequestFailed(f"{self.url}{path} answered no JSON: {_one_line(body)}") from None

    async def events(
        self, path: str, fields: dict[str, Any], sent: Callable[[float], None]
    ) -> AsyncGenerator[Any, None]:
        """The data of each server-sent event, parsed. sent: called with the time at which the request was written, by
        time.perf_counter. Raises RequestFailed, also for an event that is an error and for a stream that breaks off."""
        body = json.dumps(fields).encode()
        rest = b""
        async with aclosing(self._exchange("POST", path, body, lambda: sent(time.perf_counter()))) as parts:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield _event(data, path)
        raise RequestFailed(f"{path}: the stream ended before its [DONE]")

    async def _exchange(
        self, method: str, path: str, body: bytes, sent: Callable[[], None]
    ) -> AsyncGenerator[bytes, None]:
        try:
            reader, writer = await asyncio.open_connection(self._parts.hostname, self._port, ssl=self._ssl)
        except OSError as error:
            raise RequestFailed(f"cannot connect to {self.url}: {error.strerror or error}") from None
        try:
            head = f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._parts.netloc.rpartition('@')[2]}\r\n"
            head += f"{self._authorization}Connection: close\r\nAccept: application/json, text/event-stream\r\n"
            if body:
                head += "Content-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            sent()
            status, headers = _read_head(await reader.readuntil(b"\r\n\r\n"))
            parts = _read_body(reader, headers)
            if status != 200:
                text = b"".join([part async for part in parts])
                raise RequestFailed(f"{self.url}{path} answered {status}: {_message(text)}")
            async for part in parts:
                yield part
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            why = "the connection was closed" if isinstance(error, EOFError) else f"{type(error).__name__}: {error}"
            raise RequestFailed(f"{self.url}{path} broke off: {why}") from None
        finally:
            writer.close()


def _event(data: bytes, path: str) -> Any:
    """Raise RequestFailed if the event is an error."""
    try:
        event = json.loads(data)
    except ValueError:
        raise RequestFailed(f"{path} sent an event that is no JSON: {_one_line(data)}") from None
    if isinstance(event, dict) and event.get("error"):
        raise RequestFailed(f"{path}: {_message(data)}")
    return event


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status, headers by their lower-case names. Raises ValueError."""
    first, *lines = head.decode("latin-1").split("\r\n")
    version, status, *_ = f"{first}  ".split(" ")
    if not version.startswith("HTTP/1.") or not status.isdigit():
        raise ValueError(f"{first[:80]!r} is no answer of an HTTP server")
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return int(status), {name.strip().lower(): value.strip() for name, value in pairs}


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive. Raises EOFError if it breaks off, ValueError if it is malformed."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while part := await reader.read(65_536):
            yield part


def _message(body: bytes) -> str:
    """The message of an error: OpenAI's error.message, FastAPI's detail, or else the text."""
    try:
        found = json.loads(body)
    except ValueError:
        return _one_line(body)
    if isinstance(found, dict):
        inner = found.get("error", found)
        if isinstance(inner, dict):
            inner = inner.get("message") or inner.get("detail") or inner
        return _one_line(str(inner).encode())
    return _one_line(body)


def _one_line(body: bytes) -> str:
    text = " ".join(body.decode(errors="replace").split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
