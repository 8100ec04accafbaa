"""Makes a backend from a program's ``backend`` argument."""

from __future__ import annotations

from typing import Any

from ...engine import Engine
from .backend import Backend
from .engine_backend import EngineBackend
from .http_backend import HttpBackend
from .runtime import Runtime


def as_backend(given: Any) -> Backend:
    """Makes a backend from an Engine, a Runtime or a server's URL; returns a backend unchanged."""
    if isinstance(given, Engine):
        return EngineBackend(given)
    if isinstance(given, Runtime):
        return given.endpoint
    if isinstance(given, str):
        return HttpBackend(given)
    if isinstance(given, Backend):
        return given
    raise TypeError(
        f"backend is {given!r}; give an Engine, a Runtime, the URL of a server, or an object with Backend's methods"
    )
