"""The default backend of programs, and calls to it."""

from __future__ import annotations

from typing import Any

from .backends import Backend, as_backend


class _Default:
    backend: Backend | None = None


def set_default_backend(backend: Any) -> None:
    """Set the backend for calls of `run` without one: an Engine, a Runtime, a URL or a Backend; None for no default."""
    _Default.backend = None if backend is None else as_backend(backend)


def chosen_backend(given: Any = None) -> Backend:
    """The backend that was given, or the default one. Raises ValueError if there is none."""
    backend = _Default.backend if given is None else as_backend(given)
    if backend is None:
        raise ValueError("no backend: pass backend=... (an Engine or a server's URL), or call set_default_backend")
    return backend


def flush_cache(backend: Any = None) -> None:
    """Forget all cached prefixes. Raises BackendError while requests run, ValueError without a backend."""
    _call(backend, "flush_cache")


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """The worker's report, and from a server its settings, too."""
    return _call(backend, "get_server_info")


def _call(backend: Any, method: str) -> Any:
    chosen = chosen_backend(backend)
    if not callable(found := getattr(chosen, method, None)):
        raise TypeError(f"{type(chosen).__name__} has no method {method}()")
    return found()
