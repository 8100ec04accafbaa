"""Where programs run: an Engine in this process, or a server over HTTP."""

from .as_backend import as_backend
from .backend import Backend
from .engine_backend import EngineBackend
from .http_backend import HttpBackend, RuntimeEndpoint
from .runtime import Runtime

__all__ = ["Backend", "EngineBackend", "HttpBackend", "Runtime", "RuntimeEndpoint", "as_backend"]
