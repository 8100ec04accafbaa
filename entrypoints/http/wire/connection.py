"""One connection: uvicorn's protocol on httptools, with limits on what a stranger may hold open.

uvicorn reads heads of any size for as long as it takes, and answers what is no HTTP in plain text. Here a head has a
size and a time, a body has a time, there are only so many connections, and every refusal has
the shape of all errors.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ....scheduler.outcome import RequestRefused
from ...http_statuses import status_of
from .answers import error_body

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 * 1024

SLOWEST = 64 * 1024
"""Bytes per second of a body. Less is taken for --body-timeout only: or a byte a minute would hold memory for ever."""

_UNREAD_S = 2.0
"""How long the rest of a body is still read, and dropped, after its answer. Closing a connection on unread data resets
it, and many clients then never see the answer."""


ABORT = "baton.abort"
"""In a request's ``extensions``: drops its connection at once, with what is on its way to the client."""


@dataclass(slots=True, frozen=True)
class ConnectionLimits:
    """connections: open at the same time; more are answered with 503. head_s: seconds for a request's head. body_s:
    for its body, beyond what it takes at `SLOWEST`."""

    connections: int
    head_s: float
    body_s: float


class Connection(HttpToolsProtocol):
    """See the module. ``limits`` first; the rest is uvicorn's."""

    def __init__(self, limits: ConnectionLimits, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits = limits
        self._is_one_too_many = False
        self._has_begun = False
        """Part of a head has been read."""
        self._head_bytes = 0
        """Bytes read of the head that is expected, without its first piece where that came with the end of something
        else; -1 while no head is expected."""
        self._is_reading_body = False
        self._body_bytes, self._body_began = 0, 0.0
        self._beside_body = 0
        """Bytes since the last of the body that are none of it: sizes of chunks, trailers."""
        self._timer: asyncio.TimerHandle | None = None

    # -- what asyncio calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_one_too_many = len(self.connections) > self._limits.connections
        self._start_timer(self._limits.head_s, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        if self._is_one_too_many:
            self._refuse(RequestRefused("too many connections are open; try again soon", code="overloaded"))
            return
        was_expecting, body_bytes = self._head_bytes >= 0, self._body_bytes
        super().data_received(data)
        if self.transport.is_closing():
            return
        if was_expecting and self._head_bytes >= 0:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()
        elif self._is_reading_body:
            self._beside_body = self._beside_body + len(data) if self._body_bytes == body_bytes else 0
            if self._beside_body > MAX_HEAD_BYTES:
                self._refuse_head()
        elif self._timer is None and self.timeout_keep_alive_task is None and self._is_idle:
            # What came is no head, and yet uvicorn no longer counts the time.
            self._start_timer(self._limits.head_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    # -- what the parser calls -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes, self._has_begun = 0, True
        self._start_timer(self._limits.head_s, self._head_is_late)

    def on_header(self, name: bytes, value: bytes) -> None:
        # uvicorn takes trailers, which come after the body, for headers: one could bring a key past a proxy.
        if not self._is_reading_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._head_bytes = MAX_HEAD_BYTES + 1
            raise ValueError("the head is too large")  # ends in `send_400_response`
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[typeddict-item]
        super().on_headers_complete()  # raises for a target that is no URL, as CONNECT has; that is answered, too
        self._head_bytes, self._has_begun, self._is_reading_body = -1, False, True
        self._body_bytes, self._body_began, self._beside_body = 0, self.loop.time(), 0
        self._start_timer(self._limits.body_s, self._check_body)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_reading_body = False
        self._stop_timer()
        super().on_message_complete()

    # -- what uvicorn calls ----------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_reading_body and not self.transport.is_closing():
            self._start_timer(_UNREAD_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(RequestRefused("this is not a valid HTTP/1.1 request", code="invalid_http"))

    # -- what the server calls -------------------------------------------------------------------------------------

    def refuse_upload(self, error: RequestRefused) -> None:
        """Answer with an error if the body of a request is still on its way."""
        if self._is_reading_body and not self.cycle.response_started:
            self._refuse(error)

    # -- refusing --------------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return not self._is_reading_body and (self.cycle is None or self.cycle.response_complete)

    def _head_is_late(self) -> None:
        if self._has_begun:
            self._refuse(
                RequestRefused(f"the head did not arrive within {self._limits.head_s:g} s", code="request_timeout")
            )
        else:
            self.transport.close()  # nothing was asked

    def _check_body(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused:  # it waits for us, not we for it
            self._body_began = now
        left = self._body_began + self._limits.body_s + self._body_bytes / SLOWEST - now
        if left <= 0:
            self._refuse(
                RequestRefused(f"the body is too slow; send {SLOWEST // 1024} KiB a second", code="request_timeout")
            )
        else:
            self._start_timer(left, self._check_body)

    def _refuse_head(self) -> None:
        self._refuse(
            RequestRefused(
                f"the head, or a trailer, has more than {MAX_HEAD_BYTES} bytes; shorten the headers",
                code="head_too_large",
            )
        )

    def _refuse(self, error: RequestRefused) -> None:
        """Answer, unless an answer has begun, and close the connection."""
        logger.debug("refused a connection: %s", error.message)
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self._is_idle or not self.cycle.response_started:
            body = msgspec.json.encode(error_body(error))
            status = status_of(error)
            head = [STATUS_LINE[status], b"content-type: application/json\r\nconnection: close\r\n"]
            if status == 503:
                head.append(b"retry-after: 1\r\n")
            self.transport.write(b"".join([*head, b"content-length: %d\r\n\r\n" % len(body), body]))
        self.transport.close()

    def _start_timer(self, seconds: float, then: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def protocol_class(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """For uvicorn, which only ever calls it."""
    return cast(type[asyncio.Protocol], partial(Connection, limits))
