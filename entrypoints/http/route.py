"""A route: a path, who answers, and to which methods. Each subject's routes are a small class of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.responses import Response

GET = ("GET",)
POST = ("POST",)
GET_OR_POST = ("GET", "POST")
PROBE = ("GET", "HEAD")
DELETE = ("DELETE",)


class Route(NamedTuple):
    """handler: takes ``request: Request`` if it names it, and the path's parameters by name."""

    path: str
    handler: Callable[..., Awaitable[Response]]
    methods: tuple[str, ...]
