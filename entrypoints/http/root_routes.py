"""``/``: leads a browser to the dashboard, and tells programs that a server is there."""

from __future__ import annotations

from starlette.responses import RedirectResponse, Response

from ..server_config import ServerArgs
from .route import GET, Route
from .wire.answers import JSONAnswer

_DASHBOARD = "dashboard"
"""Relative: a proxy may serve this under a prefix."""


class RootRoutes:
    """Without a key, and without a word of what is served."""

    def __init__(self, args: ServerArgs) -> None:
        self._has_dashboard = args.server.dashboard
        # Claude Code asks for the head before anything else, and takes no redirect.
        self.routes = [
            Route("/", self.get, GET, "open"),
            Route("/", self.head, ("HEAD",), "open"),
        ]

    async def get(self) -> Response:
        if self._has_dashboard:
            return RedirectResponse(_DASHBOARD, status_code=307, headers={"Cache-Control": "no-store"})
        return JSONAnswer({"server": "baton", "docs": "/docs"})

    async def head(self) -> Response:
        return Response(media_type="application/json")
