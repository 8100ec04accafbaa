"""Names of adapters, for the code outside the worker. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .adapter_config import AdapterError

_PART = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._@-]+"
"""Excludes . and .., which no URL can hold."""
_NAME = re.compile(rf"{_PART}(/{_PART})*")
MAX_NAME_CHARS = 256


def check_adapter_name(name: str) -> None:
    """Raise AdapterError for a name that no adapter may have. Colons are not allowed: one separates model and adapter
    in MODEL:NAME."""
    if len(name) > MAX_NAME_CHARS or _NAME.fullmatch(name) is None:
        raise AdapterError(
            f"adapter name {name[:MAX_NAME_CHARS]!r}: use letters, digits and ._@-, with / between parts, "
            f"{MAX_NAME_CHARS} characters at most"
        )


class AdapterNames:
    """The adapters that requests may name, by name, as the worker reported them last."""

    def __init__(self) -> None:
        self._adapters: dict[str, Mapping[str, Any]] = {}
        self._gone: set[str] = set()

    def set_adapters(self, adapters: Sequence[Mapping[str, Any]]) -> None:
        """adapters: the worker's description of each; see `adapters.NamedAdapter.describe`."""
        found = {adapter["name"]: adapter for adapter in adapters}
        self._gone = (self._gone | self._adapters.keys()) - found.keys()
        self._adapters = found

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    @property
    def any_known(self) -> bool:
        """True if there is an adapter, or was one."""
        return bool(self._adapters or self._gone)

    def was_unloaded(self, name: str) -> bool:
        """True for the name of an adapter that has been unloaded."""
        return name in self._gone

    @property
    def described(self) -> list[Mapping[str, Any]]:
        """All adapters, in order of loading."""
        return list(self._adapters.values())
