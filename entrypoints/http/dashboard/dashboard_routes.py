"""``/dashboard``: a page that shows the server at work, its files, and the one stream of events that they read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple
from uuid import uuid4

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....runtime.tokenizer_manager import TokenizerManager
from ....scheduler.outcome import RequestRefused
from ...description.openapi import Operation
from ...server_config import ServerArgs
from ...version import baton_version
from ..route import GET, PROBE, Route
from ..wire.answers import answer_error, until_disconnect
from ..wire.connection import ABORT
from .broadcaster import Broadcaster
from .token_texts import TokenTexts

logger = logging.getLogger(__name__)

STALLED_S = 60.0
"""A client that takes nothing for so long is disconnected, and unsent events are dropped."""

_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_PAGE = Operation(
    summary="A page that shows the server at work",
    about="The page and its files hold nothing of this server, and so need no key. `GET /dashboard/events`, which they "
    "read, does: docs/http_api.md.",
    text="text/html",
    tag="Dashboard",
)
_FILE = Operation(summary="A file of that page", text="*/*", refusals=(404,), tag="Dashboard")

FIRST = "index.html"

_CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
}


class StaticFile(NamedTuple):
    content: bytes
    kind: str
    """Content type."""
    tag: str
    """ETag: a digest of the content, in quotes."""


def static_files(folder: Traversable | None = None) -> dict[str, StaticFile]:
    """Files by their paths in the folder, with slashes; only kinds of files that the page has. folder: None for this
    package's ``static``."""
    found: dict[str, StaticFile] = {}
    folders = [("", files("baton.entrypoints.http.dashboard") / "static" if folder is None else folder)]
    for path, below in folders:  # grows
        for entry in below.iterdir():
            if entry.is_dir():
                folders.append((f"{path}{entry.name}/", entry))
            elif (kind := _CONTENT_TYPES.get(entry.name.rsplit(".", 1)[-1])) is not None:
                content = entry.read_bytes()
                found[path + entry.name] = StaticFile(
                    content, kind, f'"{blake2b(content, digest_size=12).hexdigest()}"'
                )
    return found


class DashboardRoutes:
    """None with --no-dashboard."""

    def __init__(self, manager: TokenizerManager, args: ServerArgs, texts: TokenTexts | None) -> None:
        """texts: of tokens; None where no admin key guards them."""
        self._manager = manager
        self._args = args
        self._shows_text = texts is not None
        self._instance = uuid4().hex
        self._broadcaster = Broadcaster(manager.live_reports, self._hello, texts)
        self._files = static_files() if args.server.dashboard else {}
        self.routes = self._page_routes() if args.server.dashboard else []

    def _page_routes(self) -> list[Route]:
        return [
            Route("/dashboard", self.page, PROBE, "open", operation=_PAGE),
            # An endless stream is for no tool that reads a description.
            Route("/dashboard/events", self.events, GET, "admin"),
            Route("/dashboard/{path:rest}", self.file, PROBE, "open", operation=_FILE),
        ]

    async def page(self, request: Request) -> Response:
        return self._answer(request, FIRST)

    async def file(self, request: Request, path: str) -> Response:
        return self._answer(request, path)

    def _answer(self, request: Request, path: str) -> Response:
        file = self._files.get(path)
        if file is None:
            raise RequestRefused(f"there is no file {path[:100]!r} of the dashboard here", code="not_found")
        return _file_answer(file, request.headers.get("if-none-match", ""))

    async def events(self) -> Response:
        self._manager.limits  # noqa: B018  # raises what is to be answered instead of a stream
        self._broadcaster.check_room()
        return PageStream(self._broadcaster.stream())

    def _hello(self) -> dict[str, Any]:
        info = self._manager.worker_info
        scheduler, tiers = info.get("scheduler", {}), info.get("tiers", {})
        return {
            "instance": self._instance,
            "version": baton_version(),
            "model": self._args.served_model_name,
            "page_size": scheduler.get("page_size", 1),
            "total_tokens": scheduler.get("max_total_tokens", 0),
            "host_tokens": tiers.get("host_tokens", 0),
            "text_allowed": self._shows_text,
            "radix_cache": not scheduler.get("disable_radix_cache", False),
            "t": self._manager.live_reports.t,
        }


def _file_answer(file: StaticFile, known: str) -> Response:
    """known: If-None-Match."""
    headers = {**_HEADERS, "ETag": file.tag}
    if file.tag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.kind, headers=headers)


class PageStream(Response):
    """Sends the dashboard's events to one page for as long as it reads them. Ends only when the events do."""

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
            logger.debug("dashboard client stalled for %g s; disconnecting", STALLED_S)
            scope["extensions"][ABORT]()
            await send({"type": "http.response.body", "body": b"", "more_body": False})  # returns once it is gone
        finally:
            await self._events.aclose()

    @staticmethod
    async def _send_piece(send: Send, piece: bytes) -> None:
        async with asyncio.timeout(STALLED_S):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
