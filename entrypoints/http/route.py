"""A route: a path, its handler and its methods. Related routes share a small class."""

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
    """handler: gets ``request: Request`` if it declares it, and the path's parameters by name."""

    path: str
    handler: Callable[..., Awaitable[Response]]
    methods: tuple[str, ...]
