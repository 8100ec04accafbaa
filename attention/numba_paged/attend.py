"""The parts of the kernel of kernel.py, for pieces, tiles and tokens: functions that Numba compiles into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import njit

from .arguments import (
    BEGINS,
    ENDS,
    GROUP_FIELDS,
    GROUPS,
    INNER,
    KEYS,
    LARGEST,
    OUT,
    OUT_STEP,
    PIECE_FIELDS,
    PIECES,
    QUERIES,
    QUERY_STEP,
    ROWS,
    SCALE,
    SINKS,
    SLOT_STEP,
    SUMS,
    TABLE,
    TABLE_STEP,
    TOTALS,
    VALUE_STEP,
    VALUES,
)
from .kinds import BLOCK, KINDS, LANES, kept_bytes
from .operations import add_sinks, add_values, fill, finish, join, peek, peek_float, score, soften, weigh
from .whole_blocks import add_block, gather, in_pairs, pack, score_block, turn, weigh_block

inlined = njit(inline="always")
"""Numba puts such a function where it is called. LLVM could do it as well (``forceinline``), but optimizes each alone
first, then again where it is called: that takes twice the time."""


class PieceFunctions(NamedTuple):
    """The functions that a thread calls for its pieces of the work. ``a``: address of the kernel's arguments."""

    attend: Callable[[Any, Any, Any], None]
    """(a, piece, scratch): all tokens of a piece; what is found goes to the output, or to the memory for partial
    sums."""
    join: Callable[[Any, Any, Any], None]
    """(a, group, scratch): all pieces of a group lie in memory; adds them up, in their order."""


def piece_functions(
    head_dim: int, value_dim: int, rows: int, tile: int, kind_name: str, has_cap: bool, has_sinks: bool
) -> PieceFunctions:
    """rows: queries over one KV head. tile: tokens that are multiplied with a block of keys at a time."""
    kind, pairs = KINDS.index(kind_name), int(in_pairs(kind_name, head_dim, value_dim))
    key_bytes, value_bytes = kept_bytes(head_dim, kind_name), kept_bytes(value_dim, kind_name)
    capped, sinks, tile_rows = int(has_cap), int(has_sinks), tile * rows
    # In the scratch memory of a block: scores, factors, keys, values; then the state kept per token.
    factors_at = 4 * tile_rows * BLOCK
    keys_at = factors_at + 4 * tile_rows
    values_at = keys_at + 4 * head_dim * BLOCK
    state_at = values_at + 4 * value_dim * BLOCK
    fetching, not_fetching = 1, 0

    @inlined
    def attend_tile(a, queries, query_step, scratch, largest, totals, sums):  # type: ignore
        """A tile of tokens over a block that lies in the scratch memory, and that all of them see."""
        factors = scratch + factors_at
        score_block(head_dim, rows, tile, pairs, queries, query_step, scratch + keys_at, scratch)
        soften(tile_rows, capped, scratch, BLOCK, peek_float(a + 8 * INNER))
        weigh_block(tile_rows, pairs, scratch, peek_float(a + 8 * SCALE), largest, totals, factors)
        add_block(value_dim, tile_rows, pairs, sums, factors, scratch, scratch + values_at)

    @inlined
    def attend_tokens(a, first, last, low, high, head, scratch, largest, totals, sums):  # type: ignore
        """Tokens first to last − 1 over keys low to high − 1 of the first one's row, as far as each sees them."""
        keys, values = peek(a + 8 * KEYS) + head * key_bytes, peek(a + 8 * VALUES) + head * value_bytes
        slots = peek(a + 8 * TABLE) + peek(peek(a + 8 * ROWS) + 8 * first) * peek(a + 8 * TABLE_STEP)
        queries, query_step = peek(a + 8 * QUERIES) + 4 * head * rows * head_dim, peek(a + 8 * QUERY_STEP)
        begins, ends = peek(a + 8 * BEGINS), peek(a + 8 * ENDS)
        scale, step = peek_float(a + 8 * SCALE), peek(a + 8 * SLOT_STEP)
        value_step = step if value_dim == head_dim else peek(a + 8 * VALUE_STEP)
        scores, factors = scratch, scratch + factors_at
        turned, gathered, behind = scratch + keys_at, scratch + values_at, scratch + state_at
        in_tiles = head_dim % LANES == 0 and last - first > tile
        of_tiles, tile_step = queries + query_step * first, query_step
        if pairs and in_tiles:
            of_tiles, tile_step = behind + 4 * rows * (last - first) * (value_dim + 2), 2 * rows * head_dim
            for token in range(first, last):
                pack(head_dim, rows, pairs, queries + query_step * token, of_tiles + tile_step * (token - first))
        fill(largest, rows * (last - first), -float("inf"))
        fill(totals, rows * (last - first), 0.0)
        fill(sums, rows * (last - first) * value_dim, 0.0)
        begin, end = max(low, peek(begins + 8 * first)), min(high, peek(ends + 8 * (last - 1)))
        while begin < end:
            stop = min(begin + BLOCK, end)
            ahead = slots + 4 * (stop if stop + BLOCK <= end else begin)
            is_there = False
            token = first
            while token < last:
                start = max(begin, peek(begins + 8 * token))
                count = min(stop, peek(ends + 8 * token)) - start
                at, row = slots + 4 * start, (token - first) * rows
                top, total, place = largest + 4 * row, totals + 4 * row, sums + 4 * row * value_dim
                if (
                    in_tiles
                    and count == BLOCK
                    and token + tile <= last
                    and peek(begins + 8 * (token + tile - 1)) <= begin
                ):
                    if not is_there:
                        turn(head_dim, kind, pairs, keys, at, step, turned)
                        gather(head_dim, value_dim, kind, pairs, keys, values, at, ahead, step, value_step, gathered)
                        is_there = True
                    attend_tile(a, of_tiles + tile_step * (token - first), tile_step, scratch, top, total, place)
                    token += tile
                    continue
                if count > 0:
                    q = queries + query_step * token
                    if token == first:
                        score(
                            head_dim, head_dim, value_dim, rows, kind, fetching,
                            q, keys, values, at, ahead, count, step, value_step, scores,
                        )  # fmt: skip
                    else:
                        score(
                            head_dim, head_dim, value_dim, rows, kind, not_fetching,
                            q, keys, values, at, at, count, step, value_step, scores,
                        )  # fmt: skip
                    soften(rows, capped, scores, count, peek_float(a + 8 * INNER))
                    weigh(rows, pairs, scores, count, scale, top, total, factors)
                    add_values(value_dim, rows, kind, place, factors, scores, values, at, count, value_step)
                token += 1
            begin = stop

    @inlined
    def finish_row(a, head, sums, largest, totals, out):  # type: ignore
        """All keys of a token have been seen."""
        add_sinks(value_dim, rows, sinks, sums, largest, totals, peek(a + 8 * SINKS) + 4 * head * rows)
        finish(value_dim, rows, sums, totals, out)

    @inlined
    def attend_piece(a, piece, scratch):  # type: ignore
        first, last, low, high = peek(piece), peek(piece + 8), peek(piece + 16), peek(piece + 24)
        head, own, partial = peek(piece + 32), peek(piece + 40), peek(piece + 48)
        target = peek(a + 8 * OUT) + 4 * head * rows * value_dim
        at_once = 1 if own else last - first
        for token in range(first, last, at_once):
            largest = scratch + state_at
            totals = largest + 4 * rows * at_once
            sums = totals + 4 * rows * at_once
            if partial >= 0:
                place = (partial + token - first) * rows
                largest, totals = peek(a + 8 * LARGEST) + 4 * place, peek(a + 8 * TOTALS) + 4 * place
                sums = peek(a + 8 * SUMS) + 4 * place * value_dim
            stop = token + at_once
            attend_tokens(a, token, stop, low, high, head, scratch, largest, totals, sums)
            if partial < 0:
                for each in range(token, stop):
                    row = (each - token) * rows
                    out = target + peek(a + 8 * OUT_STEP) * each
                    finish_row(a, head, sums + 4 * row * value_dim, largest + 4 * row, totals + 4 * row, out)

    @inlined
    def join_pieces(a, group, scratch):  # type: ignore
        entry = peek(a + 8 * GROUPS) + 8 * GROUP_FIELDS * group
        pieces = peek(a + 8 * PIECES)
        head = peek(pieces + 8 * PIECE_FIELDS * peek(entry) + 32)
        target = peek(a + 8 * OUT) + 4 * head * rows * value_dim
        largest, totals, sums = scratch, scratch + 4 * rows, scratch + 8 * rows
        for token in range(peek(entry + 16), peek(entry + 24)):
            fill(largest, rows, -float("inf"))
            fill(totals, rows * (value_dim + 1), 0.0)  # and the sums behind them
            for number in range(peek(entry), peek(entry + 8)):
                piece = pieces + 8 * PIECE_FIELDS * number
                if peek(piece) <= token < peek(piece + 8):
                    place = (peek(piece + 48) + token - peek(piece)) * rows
                    theirs, their_totals = peek(a + 8 * LARGEST) + 4 * place, peek(a + 8 * TOTALS) + 4 * place
                    if peek_float(their_totals) != 0.0:  # it has seen keys of this token
                        their_sums = peek(a + 8 * SUMS) + 4 * place * value_dim
                        join(value_dim, rows, sums, largest, totals, their_sums, theirs, their_totals)
            finish_row(a, head, sums, largest, totals, target + peek(a + 8 * OUT_STEP) * token)

    return PieceFunctions(attend_piece, join_pieces)
