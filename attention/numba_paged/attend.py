"""The parts of the kernel of kernel.py, for pieces, tiles and tokens: functions that Numba compiles into it."""

from __future__ import annotations

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
from .kinds import BLOCK, LANES
from .operations import add_sinks, add_values, fill, finish, join, peek, peek_float, score, soften, weigh
from .whole_blocks import add_block, gather, pack, score_block, turn, weigh_block


@njit(inline="always")
def _places(head_dim, value_dim, tile_rows, scratch):  # type: ignore
    """Addresses in the scratch memory of a block: scores, factors, keys, values; then the state kept per token."""
    factors = scratch + 4 * tile_rows * BLOCK
    keys = factors + 4 * tile_rows
    values = keys + 4 * head_dim * BLOCK
    return scratch, factors, keys, values, values + 4 * value_dim * BLOCK


@njit(inline="always")
def _attend_tile(
    head_dim, value_dim, rows, tile, tile_rows, pairs, capped, a, queries, query_step, scratch, largest, totals, sums
):  # type: ignore
    """A tile of tokens over a block that lies in the scratch memory, and that all of them see."""
    scores, factors, keys, values, _ = _places(head_dim, value_dim, tile_rows, scratch)
    score_block(head_dim, rows, tile, pairs, queries, query_step, keys, scores)
    soften(tile_rows, capped, scores, BLOCK, peek_float(a + 8 * INNER))
    weigh_block(tile_rows, pairs, scores, peek_float(a + 8 * SCALE), largest, totals, factors)
    add_block(value_dim, tile_rows, pairs, sums, factors, scores, values)


@njit(inline="always")
def _attend_tokens(
    head_dim,
    value_dim,
    rows,
    tile,
    tile_rows,
    kind,
    key_bytes,
    value_bytes,
    pairs,
    capped,
    a,
    first,
    last,
    low,
    high,
    head,
    scratch,
    largest,
    totals,
    sums,
):  # type: ignore
    """Tokens first to last − 1 over keys low to high − 1 of the first one's row, as far as each sees them."""
    keys, values = peek(a + 8 * KEYS) + head * key_bytes, peek(a + 8 * VALUES) + head * value_bytes
    slots = peek(a + 8 * TABLE) + peek(peek(a + 8 * ROWS) + 8 * first) * peek(a + 8 * TABLE_STEP)
    queries, query_step = peek(a + 8 * QUERIES) + 4 * head * rows * head_dim, peek(a + 8 * QUERY_STEP)
    begins, ends = peek(a + 8 * BEGINS), peek(a + 8 * ENDS)
    scale, step = peek_float(a + 8 * SCALE), peek(a + 8 * SLOT_STEP)
    value_step = step if value_dim == head_dim else peek(a + 8 * VALUE_STEP)
    scores, factors, turned, gathered, behind = _places(head_dim, value_dim, tile_rows, scratch)
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
            if in_tiles and count == BLOCK and token + tile <= last and peek(begins + 8 * (token + tile - 1)) <= begin:
                if not is_there:
                    turn(head_dim, kind, pairs, keys, at, step, turned)
                    gather(head_dim, value_dim, kind, pairs, keys, values, at, ahead, step, value_step, gathered)
                    is_there = True
                q = of_tiles + tile_step * (token - first)
                _attend_tile(
                    head_dim,
                    value_dim,
                    rows,
                    tile,
                    tile_rows,
                    pairs,
                    capped,
                    a,
                    q,
                    tile_step,
                    scratch,
                    top,
                    total,
                    place,
                )
                token += tile
                continue
            if count > 0:
                q = queries + query_step * token
                if token == first:
                    score(
                        head_dim,
                        head_dim,
                        value_dim,
                        rows,
                        kind,
                        1,
                        q,
                        keys,
                        values,
                        at,
                        ahead,
                        count,
                        step,
                        value_step,
                        scores,
                    )
                else:
                    score(
                        head_dim,
                        head_dim,
                        value_dim,
                        rows,
                        kind,
                        0,
                        q,
                        keys,
                        values,
                        at,
                        at,
                        count,
                        step,
                        value_step,
                        scores,
                    )
                soften(rows, capped, scores, count, peek_float(a + 8 * INNER))
                weigh(rows, pairs, scores, count, scale, top, total, factors)
                add_values(value_dim, rows, kind, place, factors, scores, values, at, count, value_step)
            token += 1
        begin = stop


@njit(inline="always")
def _finish_row(value_dim, rows, sinks, a, head, sums, largest, totals, out):  # type: ignore
    """All keys of a token have been seen."""
    add_sinks(value_dim, rows, sinks, sums, largest, totals, peek(a + 8 * SINKS) + 4 * head * rows)
    finish(value_dim, rows, sums, totals, out)


@njit(inline="always")
def attend_piece(
    head_dim,
    value_dim,
    rows,
    tile,
    tile_rows,
    kind,
    key_bytes,
    value_bytes,
    pairs,
    capped,
    sinks,
    a,
    piece,
    scratch,
):  # type: ignore
    """All tokens of a piece; what is found goes to the output, or to the memory for partial sums."""
    first, last, low, high = peek(piece), peek(piece + 8), peek(piece + 16), peek(piece + 24)
    head, own, partial = peek(piece + 32), peek(piece + 40), peek(piece + 48)
    target = peek(a + 8 * OUT) + 4 * head * rows * value_dim
    at_once = 1 if own else last - first
    for token in range(first, last, at_once):
        largest = _places(head_dim, value_dim, tile_rows, scratch)[4]
        totals = largest + 4 * rows * at_once
        sums = totals + 4 * rows * at_once
        if partial >= 0:
            place = (partial + token - first) * rows
            largest, totals = peek(a + 8 * LARGEST) + 4 * place, peek(a + 8 * TOTALS) + 4 * place
            sums = peek(a + 8 * SUMS) + 4 * place * value_dim
        stop = token + at_once
        _attend_tokens(
            head_dim,
            value_dim,
            rows,
            tile,
            tile_rows,
            kind,
            key_bytes,
            value_bytes,
            pairs,
            capped,
            a,
            token,
            stop,
            low,
            high,
            head,
            scratch,
            largest,
            totals,
            sums,
        )
        if partial < 0:
            for each in range(token, stop):
                row = (each - token) * rows
                out = target + peek(a + 8 * OUT_STEP) * each
                own_sums, total = sums + 4 * row * value_dim, totals + 4 * row
                _finish_row(value_dim, rows, sinks, a, head, own_sums, largest + 4 * row, total, out)


@njit(inline="always")
def join_pieces(value_dim, rows, sinks, a, group, scratch):  # type: ignore
    """All pieces of a group lie in memory: add them up, in their order."""
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
        out = target + peek(a + 8 * OUT_STEP) * token
        _finish_row(value_dim, rows, sinks, a, head, sums, largest, totals, out)
