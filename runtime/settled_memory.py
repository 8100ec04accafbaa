"""What a process does with its memory once it has started."""

from __future__ import annotations

import ctypes
import gc


def settle_memory() -> None:
    """Collect what starting has left behind, keep the rest out of later collections, and free what can be freed."""
    gc.collect()
    gc.freeze()  # what is alive now stays alive: every module, for example
    return_free_memory()


def return_free_memory() -> None:
    """Give the system back what the C library keeps of freed memory, which it does by itself only at the end of its
    heaps. Takes milliseconds. A C library other than glibc has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
