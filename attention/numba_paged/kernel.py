"""The kernel: attends to K and V where they lie, slot by slot, and copies nothing.

    for each block of keys            what a core's first cache holds
        for each token                scores = q · K     the next keys and these values are fetched meanwhile
                                      weights = exp(scores − the largest so far); what was summed before is rescaled
                                      sum += weights · V

It is the online softmax of FlashAttention (Dao et al. 2022) over the pages of vLLM (Kwon et al. 2023). What there is to
do is cut into pieces (pieces.py). Threads take the next one until none is left; whoever ends the last of several pieces
that belong together joins them. So a thread that waits for a core holds up one piece and no more.

It is compiled for a head size, a number of heads over one KV head (``group``) and a type of number, by Numba, which is
optional: without it this file cannot be imported. It knows addresses only, and checks nothing.
"""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path
from typing import Any

from numba import cfunc

from . import operations, vectors
from .operations import BLOCK, KINDS, add_values, fetch_add, fill, finish, join, peek, peek_float, score, weigh

# Arguments: an array of int64, by index. Addresses, but for NEXT (the piece that is taken next), TICKET (threads that
# have begun), COUNT (of pieces), the steps, which are bytes from one row to the next, and SCALE, a float32.
(
    NEXT, TICKET, COUNT, PIECES, ROWS, BEGINS, ENDS, GROUPS, LEFT, TABLE, TABLE_STEP, QUERIES, QUERY_STEP,
    KEYS, VALUES, SLOT_STEP, OUT, OUT_STEP, SUMS, LARGEST, TOTALS, SCRATCH, SCRATCH_STEP, SCALE,
) = range(24)  # fmt: skip
ARGUMENTS = 24

# A piece, and a group of pieces that are joined: see pieces.py.
PIECE_FIELDS, GROUP_FIELDS = 8, 4


def scratch_bytes(head_dim: int, group: int, tokens: int) -> int:
    """What a thread needs of its own: sums, largest scores and totals of so many tokens, and scores of a block."""
    floats = tokens * group * (head_dim + 2) + group * (BLOCK + 1)
    return -(-floats * 4 // 64) * 64 + 64


@cache
def compile_kernel(head_dim: int, group: int, kind: str) -> Any:
    """A Numba cfunc ``void(address of the arguments)`` that needs no GIL; every thread of a team calls it. The first
    time takes two seconds; where Numba finds a folder to write to, later processes take a tenth. Raises ImportError."""
    sources = _sources()
    rows, number, item = group, KINDS.index(kind), 4 if kind == "float32" else 2

    def kernel(a):
        if not sources:
            return
        scale = peek_float(a + 8 * SCALE)
        scores = peek(a + 8 * SCRATCH) + fetch_add(a + 8 * TICKET, 1) * peek(a + 8 * SCRATCH_STEP)
        factors = scores + 4 * rows * BLOCK
        own_largest = factors + 4 * rows
        count, table, table_step = peek(a + 8 * COUNT), peek(a + 8 * TABLE), peek(a + 8 * TABLE_STEP)
        token_rows, begins, ends = peek(a + 8 * ROWS), peek(a + 8 * BEGINS), peek(a + 8 * ENDS)
        queries, query_step = peek(a + 8 * QUERIES), peek(a + 8 * QUERY_STEP)
        slot_step, out, out_step = peek(a + 8 * SLOT_STEP), peek(a + 8 * OUT), peek(a + 8 * OUT_STEP)
        while True:
            mine = fetch_add(a + 8 * NEXT, 1)
            if mine >= count:
                break
            piece = peek(a + 8 * PIECES) + 8 * PIECE_FIELDS * mine
            first, last, low, high = peek(piece), peek(piece + 8), peek(piece + 16), peek(piece + 24)
            head, own, partial, together = peek(piece + 32), peek(piece + 40), peek(piece + 48), peek(piece + 56)
            keys = peek(a + 8 * KEYS) + head * head_dim * item
            values = peek(a + 8 * VALUES) + head * head_dim * item
            token = first
            while token < last:
                stop = token + 1 if own else last
                tokens = stop - token
                slots = table + peek(token_rows + 8 * token) * table_step
                if partial < 0:
                    largest = own_largest
                    totals = largest + 4 * rows * tokens
                    acc = totals + 4 * rows * tokens
                else:
                    place = (partial + token - first) * rows
                    largest, totals = peek(a + 8 * LARGEST) + 4 * place, peek(a + 8 * TOTALS) + 4 * place
                    acc = peek(a + 8 * SUMS) + 4 * place * head_dim
                fill(largest, rows * tokens, -float("inf"))
                fill(totals, rows * tokens, 0.0)
                fill(acc, rows * tokens * head_dim, 0.0)
                begin = max(low, peek(begins + 8 * token))
                end = min(high, peek(ends + 8 * (stop - 1)))
                while begin < end:
                    block_end = min(begin + BLOCK, end)
                    ahead = block_end if block_end + BLOCK <= end else begin
                    for each in range(token, stop):
                        start = max(begin, peek(begins + 8 * each))
                        size = min(block_end, peek(ends + 8 * each)) - start
                        if size <= 0:
                            continue
                        q = queries + query_step * each + 4 * head * rows * head_dim
                        at = slots + 4 * start
                        if each == token:
                            soon = slots + 4 * ahead
                            score(head_dim, rows, number, 1, q, keys, values, at, soon, size, slot_step, scores)
                        else:
                            score(head_dim, rows, number, 0, q, keys, values, at, at, size, slot_step, scores)
                        index = (each - token) * rows
                        weigh(rows, scores, size, scale, largest + 4 * index, totals + 4 * index, factors)
                        total = acc + 4 * index * head_dim
                        add_values(head_dim, rows, number, total, factors, scores, values, at, size, slot_step)
                    begin = block_end
                if partial < 0:
                    for each in range(token, stop):
                        index = (each - token) * rows
                        target = out + out_step * each + 4 * head * rows * head_dim
                        finish(head_dim, rows, acc + 4 * index * head_dim, totals + 4 * index, target)
                token = stop
            if together < 0 or fetch_add(peek(a + 8 * LEFT) + 8 * together, -1) > 1:
                continue
            # The last of a group: all its pieces lie in memory now.
            entry = peek(a + 8 * GROUPS) + 8 * GROUP_FIELDS * together
            for each in range(peek(entry + 16), peek(entry + 24)):
                largest, totals, acc = own_largest, own_largest + 4 * rows, own_largest + 8 * rows
                fill(largest, rows, -float("inf"))
                fill(totals, rows, 0.0)
                fill(acc, rows * head_dim, 0.0)
                for other in range(peek(entry), peek(entry + 8)):
                    part = peek(a + 8 * PIECES) + 8 * PIECE_FIELDS * other
                    if peek(part) <= each < peek(part + 8):
                        place = (peek(part + 48) + each - peek(part)) * rows
                        if peek_float(peek(a + 8 * TOTALS) + 4 * place) != 0.0:
                            join(
                                head_dim, rows, acc, largest, totals,
                                peek(a + 8 * SUMS) + 4 * place * head_dim,
                                peek(a + 8 * LARGEST) + 4 * place, peek(a + 8 * TOTALS) + 4 * place,
                            )  # fmt: skip
                finish(head_dim, rows, acc, totals, out + out_step * each + 4 * head * rows * head_dim)

    try:
        return cfunc("void(int64)", cache=True)(kernel)
    except RuntimeError:  # Numba finds no folder that it may write to
        return cfunc("void(int64)")(kernel)


def _sources() -> int:
    """Numba keeps compiled code for as long as the file of a function is the same; this one consists of three. What it
    uses of this number belongs to the key."""
    return zlib.crc32(b"".join(Path(str(part.__file__)).read_bytes() for part in (operations, vectors))) | 1
