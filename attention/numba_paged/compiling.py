"""Compiles functions that a team of threads calls, and keeps them for later processes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from numba import cfunc


def compiled(function: Callable[[Any], None]) -> Any:
    """A Numba cfunc ``void(address of its arguments)`` that needs no GIL. The first time takes a second or two; where
    Numba finds a folder to write to, later processes take a tenth."""
    try:
        return cfunc("void(int64)", cache=True)(function)
    except RuntimeError:  # Numba finds no folder that it may write to
        return cfunc("void(int64)")(function)


def checksum(*modules: ModuleType) -> int:
    """Of their source; never 0. Numba keeps compiled code for as long as the file of the function itself is the same.
    What a function uses of this number belongs to the key, so one that is made of other files tests it."""
    return zlib.crc32(b"".join(Path(str(module.__file__)).read_bytes() for module in modules)) | 1
