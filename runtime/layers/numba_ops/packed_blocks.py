"""Shared by the kernels for packed weights: their error, and how threads divide blocks."""

from __future__ import annotations

from functools import cache


class NoKernelError(ValueError):
    """There is no kernel for a weight of this form or size."""


RUN_BYTES = 1 << 18
"""A thread that reads so many bytes in a row gets all the speed that memory has for it."""


@cache
def run_length(count: int, block_bytes: int, threads: int) -> int:
    """Blocks, of ``count``, that a thread takes at a time: up to RUN_BYTES of them, but at least two runs for each
    thread, and so that threads of equal speed get equally many blocks."""
    share = -(-count // threads)
    for length in range(min(RUN_BYTES // block_bytes, count // (2 * threads)), 1, -1):
        if -(-count // (length * threads)) * length == share:
            return length
    return 1
