"""Results of trials, kept from one start to the next: which form of a matrix product is fastest here, and the like.

One small JSON file for each result, under a checksum of everything that it depends on. A file that cannot be read, or
is another's, counts as missing and is written anew; where files cannot be written, the trial is repeated at the next
start. Two servers may write at once: a file appears whole, and the last one stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from . import processor
from .cache_folder import VARIABLE, cache_folder

logger = logging.getLogger(__name__)

FORMAT = 1
MOST_BYTES = 1 << 16
"""Larger files are not ours."""

_PACKAGE = Path(__file__).parent.parent
_SOURCES = ("attention/numba_paged/*.py", "attention/*.py", "runtime/layers/*.py", "runtime/layers/numba_ops/*.py")
"""A change of any of these makes all results stale."""


class TrialResults:
    """Finds and keeps results. Never raises: what cannot be kept is logged once."""

    def __init__(self, folder: Path | None = None, threads: int | None = None) -> None:
        """folder: None takes trials/ in the cache folder. threads: of the products; None: as many as torch uses now."""
        self._folder = folder
        self.threads = threads or torch.get_num_threads()

    def find(self, kind: str, key: Mapping[str, Any], is_valid: Callable[[Any], bool]) -> Any:
        """The result of a trial of this kind, or None. key: what it depends on besides processor, threads and versions;
        JSON. is_valid: does the value mean anything to the caller? It may be any JSON."""
        whole = self._whole_key(kind, key)
        try:
            path = self._path(kind, whole)
            with path.open("rb") as file:
                text = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn(f"cannot read results of trials ({error}); trying again")
            return None
        try:
            entry = json.loads(text) if len(text) <= MOST_BYTES else None
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or entry.get("key") != whole or not is_valid(entry.get("value")):
            _warn(f"the result of a trial in {path} is damaged or another's; trying again")
            return None
        return entry["value"]

    def keep(self, kind: str, key: Mapping[str, Any], value: Any) -> None:
        """Keep the result of a trial. value: JSON."""
        whole, unfinished = self._whole_key(kind, key), None
        try:
            path = self._path(kind, whole)
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
            with os.fdopen(descriptor, "w") as file:
                json.dump({"key": whole, "value": value}, file)
            os.replace(unfinished, path)
        except OSError as error:
            if unfinished is not None:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished)
            _warn(f"results of trials cannot be kept ({error}); set {VARIABLE} to a folder that can be written")

    def _path(self, kind: str, whole: Mapping[str, Any]) -> Path:
        name = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:32]
        return (self._folder or cache_folder() / "trials") / f"{kind.replace(' ', '-')}-{name}.json"

    def _whole_key(self, kind: str, key: Mapping[str, Any]) -> dict[str, Any]:
        return {"kind": kind, "threads": self.threads, **self._surroundings, **key}

    @cached_property
    def _surroundings(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "processor": processor.fingerprint(),
            "torch": str(torch.__version__),
            "numba": _version("numba"),
            "sources": _sources_checksum(),
        }


@cache
def _warn(message: str) -> None:
    """Once for each message."""
    logger.warning("%s", message)


@cache
def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _sources_checksum() -> int:
    found = 0
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            found = zlib.crc32(path.read_bytes(), found)
    return found
