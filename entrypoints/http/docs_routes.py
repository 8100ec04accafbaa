"""``/openapi.json`` describes every endpoint; ``/docs`` shows the description with Swagger UI. The server has the files
of that page, which loads nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

import msgspec
from fastapi import Request
from starlette.responses import Response

from ...scheduler.outcome import RequestRefused
from ..description.json_schema import open_object
from ..description.openapi import Described, Operation, openapi_document
from ..version import baton_version
from .route import GET, PROBE, Route
from .unserved_routes import UNSERVED

_ABOUT = """Baton serves language models whose work comes in stages.

A field is either served or refused by name, and null is its default. All errors have the same shape, with the field in
`param`; those of `/v1/messages` have Anthropic's shape.

Names (rids, jobs, responses) belong to the client of the request's key. With the admin key, `?client=NAME` selects
another client, at every endpoint.

"""

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Baton: HTTP API</title>
<link rel="icon" href="data:,"><link rel="stylesheet" href="docs/swagger-ui.css"></head>
<body><div id="api"></div><script src="docs/swagger-ui-bundle.js"></script><script src="docs/start.js"></script></body>
</html>
"""
_START = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#api", docExpansion: "list", validatorUrl: null})\n'

_KINDS = {"css": "text/css", "js": "text/javascript"}
_FILES = ("swagger-ui.css", "swagger-ui-bundle.js")

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No page of another origin may frame it: its buttons send requests to this server."""
_DOCUMENT = Operation(summary="This description", answer=open_object(), tag="Documentation")
_READ = Operation(summary="This description, as a page", text="text/html", tag="Documentation")
_ASSET = Operation(summary="A file of that page", text="*/*", refusals=(404,), tag="Documentation")


class DocsRoutes:
    """Open to all: a browser sends no key, and the description is the same for every server."""

    def __init__(self, described: list[Route]) -> None:
        """described: all other routes."""
        self.routes = [
            Route("/openapi.json", self.document, PROBE, "open", operation=_DOCUMENT),
            Route("/docs", self.page, GET, "open", operation=_READ),
            Route("/docs/{name}", self.file, GET, "open", operation=_ASSET),
        ]
        listed = [route for route in [*described, *self.routes] if route.operation is not None]
        self._document = msgspec.json.encode(
            openapi_document(map(_described, listed), title="Baton", version=baton_version(), about=_about())
        )

    async def document(self) -> Response:
        return Response(self._document, media_type="application/json")

    async def page(self, request: Request) -> Response:
        return Response(_PAGE, media_type="text/html", headers={"Content-Security-Policy": _POLICY})

    async def file(self, name: str) -> Response:
        if name == "start.js":
            return Response(_START, media_type=_KINDS["js"])
        if name not in _FILES:
            raise RequestRefused(f"there is no /docs/{name} here", code="not_found")
        content = (files("fastapi_offline") / "static" / name).read_bytes()
        kind = _KINDS[name.rsplit(".", 1)[1]]
        return Response(content, media_type=kind, headers={"Cache-Control": "max-age=3600"})


def _described(route: Route) -> Described:
    assert route.operation is not None
    return Described(route.path, route.methods, route.operation, route.media, needs_key=route.access != "open")


def _about() -> str:
    lines = [f"- {', '.join(f'`{path}`' for path in paths)}: {reason}" for reason, paths in UNSERVED.items()]
    return (
        _ABOUT
        + "Endpoints of other servers that this one lacks; it answers them with 404 `not_implemented`:\n\n"
        + "\n".join(lines)
    )
