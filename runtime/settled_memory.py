"""Garbage collection during a process's start, and what is freed at its end."""

from __future__ import annotations

import ctypes
import gc
import threading

_paused = threading.Event()


def pause_collection() -> None:
    """Collect no garbage until `settle_memory`. For processes that are Baton's alone."""
    _paused.set()
    gc.disable()


def keep_imports() -> None:
    """In a pause: keep all objects there are out of every later collection."""
    if _paused.is_set():
        gc.freeze()


def settle_memory() -> None:
    """Collect garbage, keep all other objects out of later collections, and return free memory. Ends a pause."""
    gc.collect()
    gc.freeze()  # what is alive now stays alive: every module, for example
    if _paused.is_set():
        _paused.clear()
        gc.enable()
    return_free_memory()


def return_free_memory() -> None:
    """Return memory to the system that the C library keeps after it was freed; by itself it returns only the ends of
    its heaps. Takes milliseconds. C libraries other than glibc have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
