"""The kernel: attends to K and V where they lie, slot by slot, and copies nothing.

    for each block of keys            what a core's first cache holds
        for each token                scores = q · K     the next keys and these values are fetched meanwhile
                                      weights = exp(scores − the largest so far); what was summed before is rescaled
                                      sum += weights · V
                                      several tokens at once, where all of them see the whole block

It is the online softmax of FlashAttention (Dao et al. 2022) over the pages of vLLM (Kwon et al. 2023). The work is
cut into pieces (pieces.py). Threads take the next piece until none is left; the thread that ends the last of several
pieces that belong together joins them. So a thread that waits for a core holds up one piece and no more.

It is compiled for the sizes of keys and values, a number of heads over one KV head (``group``), a type of number, and
with or without soft caps and sinks. It knows addresses only, and checks nothing.

A soft cap bends scores before they become weights (`soften`). A sink is added once per row, when all keys of the row
have been seen and pieces are joined (`add_sinks`).
"""

from __future__ import annotations

from typing import Any

from .arguments import COUNT, LEFT, NEXT, PIECE_FIELDS, PIECES, SCRATCH, SCRATCH_STEP, TICKET
from .compiling import KernelFunction, kernel_builder
from .kinds import BLOCK, ROWS_AT_ONCE


def tile_tokens(group: int) -> int:
    """Tokens that are multiplied with a block of keys at a time."""
    return max(1, ROWS_AT_ONCE // group)


def scratch_bytes(head_dim: int, value_dim: int, group: int, tokens: int) -> int:
    """Bytes of scratch memory per thread: scores, keys and values of a block; sums, largest scores, totals and packed
    queries of so many tokens."""
    of_block = tile_tokens(group) * group * (BLOCK + 1) + (head_dim + value_dim) * BLOCK
    floats = of_block + tokens * group * (value_dim + 2 + head_dim // 2)
    return -(-floats * 4 // 64) * 64 + 64


@kernel_builder
def attention_kernel(
    head_dim: int, group: int, kind: str, *, value_dim: int = 0, has_cap: bool = False, has_sinks: bool = False
) -> KernelFunction:
    """value_dim: 0 if values are as wide as keys. has_cap: INNER is read. has_sinks: SINKS is read."""
    from .attend import piece_functions
    from .operations import fetch_add, peek

    attend, join = piece_functions(head_dim, value_dim or head_dim, group, tile_tokens(group), kind, has_cap, has_sinks)

    def kernel(a: Any) -> None:
        scratch = peek(a + 8 * SCRATCH) + fetch_add(a + 8 * TICKET, 1) * peek(a + 8 * SCRATCH_STEP)
        while True:
            mine = fetch_add(a + 8 * NEXT, 1)
            if mine >= peek(a + 8 * COUNT):
                return
            piece = peek(a + 8 * PIECES) + 8 * PIECE_FIELDS * mine
            attend(a, piece, scratch)
            together = peek(piece + 56)
            if together >= 0 and fetch_add(peek(a + 8 * LEFT) + 8 * together, -1) == 1:
                join(a, together, scratch)

    return kernel
