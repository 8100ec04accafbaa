"""Sends the dashboard's events to one page for as long as it reads them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....scheduler.outcome import RequestRefused
from ..wire.connection import ABORT
from ..wire.transport import answer_error, until_disconnect

logger = logging.getLogger(__name__)

STALLED_S = 60.0
"""A page that takes nothing for so long is dropped, and what was on its way to it."""


class PageStream(Response):
    """Does not end by itself, unless the events do."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        """events: may raise RequestRefused before the first."""
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            try:
                first = await anext(self._events)
            except RequestRefused as error:
                await answer_error(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_piece(send, first)
            async for piece in self._events:
                await self._send_piece(send, piece)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            logger.debug("a page of the dashboard took nothing for %g s, and is dropped", STALLED_S)
            scope["extensions"][ABORT]()
            await send({"type": "http.response.body", "body": b"", "more_body": False})  # returns once it is gone
        finally:
            await self._events.aclose()

    @staticmethod
    async def _send_piece(send: Send, piece: bytes) -> None:
        async with asyncio.timeout(STALLED_S):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
