"""Frees memory at the end of a process's start."""

from __future__ import annotations

import ctypes
import gc


def settle_memory() -> None:
    """Collect garbage, keep all other objects out of later collections, and return free memory."""
    gc.collect()
    gc.freeze()  # what is alive now stays alive: every module, for example
    return_free_memory()


def return_free_memory() -> None:
    """Return memory to the system that the C library keeps after it was freed; by itself it returns only the ends of
    its heaps. Takes milliseconds. C libraries other than glibc have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
