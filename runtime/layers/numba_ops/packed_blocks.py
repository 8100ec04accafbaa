"""What products with packed weights of all kinds share."""

from __future__ import annotations

from functools import cache


class NoKernelError(ValueError):
    """There is no kernel for a weight of this form or size."""


RUN_BYTES = 1 << 18
"""Blocks of so many bytes, side by side, are read from memory as fast as can be."""


@cache
def run_length(count: int, block_bytes: int, threads: int) -> int:
    """Blocks, of ``count``, that a thread takes at a time: up to RUN_BYTES of them, but at least two runs for each
    thread, and so that threads of equal speed get equally many blocks."""
    share = -(-count // threads)
    for length in range(min(RUN_BYTES // block_bytes, count // (2 * threads)), 1, -1):
        if -(-count // (length * threads)) * length == share:
            return length
    return 1
