"""A route: a path, its handler, methods and access. Related routes share a small class; its ``routes`` lists them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Literal, NamedTuple

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.responses import Response
from starlette.routing import compile_path

from ..description.openapi import Operation
from .wire.answers import ErrorBody, error_body

GET = ("GET",)
POST = ("POST",)
GET_OR_POST = ("GET", "POST")
PROBE = ("GET", "HEAD")
DELETE = ("DELETE",)

Access = Literal["open", "serving", "admin"]
"""open: probes and scrapers carry no key. serving: calls of a client for itself. admin: calls that change the server
for all clients."""

JSON = "application/json"
BINARY = "application/octet-stream"
ANY_MEDIA = "*/*"
"""For routes that read no body, and change nothing."""


class _Rest(PathConvertor):
    """The framework's ``path`` with newlines: that one matches no path with a newline, and cuts off the last."""

    regex = "(?s:.*)"


register_url_convertor("rest", _Rest())


class Route(NamedTuple):
    """handler: gets ``request: Request`` if it declares it, and the path's parameters by name. media: the content type
    of its body, if it takes one. error_body: the shape of its errors. operation: how it is described; None for what
    /openapi.json leaves out. GET of a route that takes POST as well is for old clients, and needs a key."""

    path: str
    handler: Callable[..., Awaitable[Response]]
    methods: tuple[str, ...]
    access: Access = "serving"
    media: str = JSON
    error_body: ErrorBody = error_body
    operation: Operation | None = None

    def changes_state(self, method: str) -> bool:
        return method not in PROBE or "POST" in self.methods


class RouteTable:
    """Finds the route of a request before the framework does, for checks that come first."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._exact: dict[tuple[str, str], Route] = {}
        self._patterns = []
        for route in routes:
            for method in route.methods:
                self._exact[route.path, method] = route
            # Of every route: the framework's patterns also take a path with a newline at its end.
            self._patterns.append((compile_path(route.path)[0], route))

    def find_route(self, path: str, method: str) -> Route | None:
        """None where the framework will answer 404 or 405."""
        if found := self._exact.get((path, method)):
            return found
        matching = (route for pattern, route in self._patterns if method in route.methods and pattern.match(path))
        return next(matching, None)

    def methods_of(self, path: str) -> list[str]:
        """The methods of a path; empty where there is no such path."""
        return sorted({name for pattern, route in self._patterns if pattern.match(path) for name in route.methods})

    def error_body_of(self, path: str) -> ErrorBody:
        """The shape of errors of a path, or below a path, that no route takes by this method."""
        for _, route in self._patterns:
            if route.error_body is not error_body and f"{path}/".startswith(f"{route.path}/"):
                return route.error_body
        return error_body
