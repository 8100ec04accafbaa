"""Compiles functions that a team of threads calls, and keeps them for later processes."""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from numba import cfunc
from numba.core import config
from numba.core.caching import FunctionCache

from ..cache_folder import cache_folder

logger = logging.getLogger(__name__)

SIGNATURE = "void(int64)"

numba_config: Any = config
"""It gets its attributes when Numba is imported."""

_PACKAGE = Path(__file__).parent.parent.parent


def choose_folder() -> None:
    """Where the package's folder cannot be written, and NUMBA_CACHE_DIR names none, keep kernels in the cache folder.
    (Numba's own choice would be one below the home folder, which a service may lack.) In any of them, code for one
    processor is never found by another: its name and features belong to Numba's key."""
    if numba_config.CACHE_DIR or os.access(_PACKAGE, os.W_OK):
        return
    with contextlib.suppress(OSError):  # then Numba looks for a folder by itself
        folder = cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            numba_config.CACHE_DIR = str(folder)


choose_folder()


def compiled(function: Callable[..., None], decorate: Callable[..., Any] | None = None) -> Any:
    """A Numba cfunc ``void(address of its arguments)`` that needs no GIL, or what ``decorate`` compiles. The first time
    takes a second or two; where Numba finds a folder to write to, later processes take a tenth. A cache that cannot be
    read is rebuilt."""
    decorate = decorate or partial(cfunc, SIGNATURE)
    try:
        return decorate(cache=True)(function)
    except RuntimeError:  # Numba finds no folder that it may write to
        return decorate()(function)
    except Exception as error:  # files cut short, a full disk; if the function itself is bad, the last try says so
        with contextlib.suppress(Exception):
            kept = FunctionCache(function)
            _warn(kept.cache_path, f"{type(error).__name__}: {error}")
            kept.flush()
            return decorate(cache=True)(function)
        return decorate()(function)


@cache
def _warn(folder: str, reason: str) -> None:
    """Once for each reason."""
    logger.warning("cannot load the compiled-kernel cache in %s; recompiling: %s", folder, reason)


def checksum(*modules: ModuleType) -> int:
    """The checksum of the modules' source; never 0. Numba keeps compiled code until the function's own file changes.
    The values that a function uses belong to the key, so a function that is built from other files tests this one."""
    return zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in modules)) | 1
