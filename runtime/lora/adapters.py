"""The worker's registry of adapters: their names, their loading in a thread, and the end of their weights.

    load ──thread: read, check, copy to the device──▶ take_loaded: installed, named ──▶ key_of, for new requests
    unload ──▶ the name goes at once ──▶ no live request has the adapter ──▶ drop_unused: its weights go

A request gets the adapter's key, a digest of its contents, so a name can be given to another adapter while requests
still use the first.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from ...scheduler.outcome import RequestRefused
from ..messages import LoadAdapter
from .adapter_config import AdapterError
from .adapter_files import read_adapter
from .adapter_weights import AdapterWeights, PreparedAdapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that requests may name."""

    name: str
    path: str
    key: str
    rank: int
    num_modules: int
    num_bytes: int

    def describe(self) -> dict[str, object]:
        return {
            "name": self.name,
            "path": self.path,
            "rank": self.rank,
            "num_modules": self.num_modules,
            "num_bytes": self.num_bytes,
        }


class Adapters:
    """See the module docstring. ``wake``: called, from another thread, when an adapter has been read."""

    def __init__(self, weights: AdapterWeights, max_adapters: int = 0, wake: Callable[[], None] = lambda: None) -> None:
        """max_adapters: names at a time; 0 for any number."""
        self._weights = weights
        self._max_adapters = max_adapters
        self._wake = wake
        self._named: dict[str, NamedAdapter] = {}
        self._one_at_a_time = threading.Lock()
        self._read: deque[tuple[LoadAdapter, PreparedAdapter | Exception]] = deque()

    def load(self, name: str, path: str) -> None:
        """Load an adapter now, at the worker's start. Raises AdapterError."""
        try:
            self._check_name(name, path)
            self._add(name, path, self._weights.prepare(read_adapter(path)))
        except AdapterError as error:
            raise AdapterError(f"adapter {name!r}: {error}") from None

    def begin_load(self, call: LoadAdapter) -> None:
        """Read an adapter in a thread; `take_loaded` returns the call once it is there. Raises AdapterError for a name
        that cannot be given."""
        self._check_name(call.name, call.path)
        threading.Thread(target=self._load, args=(call,), name="adapter", daemon=True).start()

    def take_loaded(self) -> list[tuple[LoadAdapter, Exception | None]]:
        """Install what has been read. Returns the calls that are done: each with None, or why it failed."""
        done: list[tuple[LoadAdapter, Exception | None]] = []
        while self._read:
            call, result = self._read.popleft()
            try:
                if isinstance(result, Exception):
                    raise result
                self._check_name(call.name, call.path, result.key)
                self._add(call.name, call.path, result)
            except Exception as error:
                done.append((call, error))
            else:
                done.append((call, None))
        return done

    def unload(self, name: str) -> bool:
        """Take a name from its adapter: no later request gets it. False if there is none of this name."""
        return self._named.pop(name, None) is not None

    def drop_unused(self, in_use: Set[str]) -> None:
        """Drop the weights of adapters without a name that no request uses. in_use: the keys of those that do."""
        for key in self._weights.keys - self.named_keys - in_use:
            self._weights.remove(key)

    @property
    def named_keys(self) -> set[str]:
        """Keys of the adapters that requests may name."""
        return {adapter.key for adapter in self._named.values()}

    @property
    def has_unnamed(self) -> bool:
        """True if an adapter has lost its name but still has weights."""
        return bool(self._weights.keys - self.named_keys)

    def key_of(self, name: str) -> str:
        """The key of a request's adapter; "" for none. Raises RequestRefused (404)."""
        if not name:
            return ""
        adapter = self._named.get(name)
        if adapter is None:
            loaded = ", ".join(map(repr, self._named)) or "none"
            raise RequestRefused(
                f"there is no adapter {name[:100]!r}; loaded: {loaded}", code="adapter_not_found", param="lora_path"
            )
        return adapter.key

    def describe(self) -> list[dict[str, object]]:
        """Describe each adapter that requests may name, in order of loading."""
        return [adapter.describe() for adapter in self._named.values()]

    def _load(self, call: LoadAdapter) -> None:
        result: PreparedAdapter | Exception
        try:
            with self._one_at_a_time:  # each may take gigabytes for a moment
                result = self._weights.prepare(read_adapter(call.path))
        except Exception as error:
            result = error
        self._read.append((call, result))
        self._wake()

    def _add(self, name: str, path: str, adapter: PreparedAdapter) -> None:
        if adapter.key not in self._weights.keys:
            self._weights.install(adapter)
        self._named[name] = NamedAdapter(name, path, adapter.key, adapter.rank, adapter.num_modules, adapter.num_bytes)
        logger.info(
            "adapter %s: rank %d, %d modules, %.1f MiB, from %s",
            name,
            adapter.rank,
            adapter.num_modules,
            adapter.num_bytes / 2**20,
            path,
        )

    def _check_name(self, name: str, path: str, key: str | None = None) -> None:
        """key: the key of the adapter that would get the name, if known. Raises AdapterError."""
        known = self._named.get(name)
        if known is not None and (known.path != path or key not in (None, known.key)):
            raise AdapterError(f"there is an adapter {name!r} already, from {known.path}; unload it first")
        if known is None and self._max_adapters and len(self._named) >= self._max_adapters:
            raise AdapterError(
                f"{len(self._named)} adapters are loaded, the maximum; unload one, or raise --max-loaded-loras"
            )


def load_adapters(adapters: Adapters, paths: Mapping[str, str]) -> None:
    """Load adapters at the worker's start. paths: by name. Raises AdapterError."""
    for name, path in paths.items():
        adapters.load(name, path)
