"""The kernels of layers with states, through recurrences.py: each walks through the tokens of the rows of a step.

The work is cut into units, of which threads take one after the other: a row of the step, and in it a head, or some
channels. Units share no number of any state, so that one may overwrite the state that it starts from. A unit starts
from its row's source. Where a segment of its row ends, the state stays in that segment's target, and the next segment
starts from it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....attention.numba_paged.compiling import KernelFunction, kernel_builder
from ....attention.numba_paged.kinds import KINDS, item_bytes
from .state_arguments import (
    A_STEP,
    AFTER,
    AFTER_STEP,
    B_STEP,
    BEFORE,
    BEFORE_STEP,
    BIAS,
    COUNT,
    DT_BIAS,
    ENDS,
    EPS,
    NEXT,
    OUT,
    RATE,
    SEGMENT_ENDS,
    SKIP,
    SLOT_STEP,
    SOURCES,
    STATE,
    TABLE,
    TARGETS,
    TOKEN_ENDS,
    WEIGHT,
    X_STEP,
    Z_STEP,
    A,
    B,
    X,
    Z,
)

GROUPS = 4
"""Groups of CHANNELS that are a unit of a convolution."""

STATE_BYTES = 1 << 15
"""Most of a state that is one unit: what a core's first cache holds."""

NORM_EPS = np.float32(1e-6)
"""Added to the square of |q| and |k|."""

AT_ONCE = 4
"""Rows that a thread takes where a row is a unit."""


@kernel_builder
def conv_kernel(channels: int, taps: int, kind: str, *, silu: bool, has_bias: bool, is_gated: bool) -> KernelFunction:
    """OUT = the convolution of X, with the last inputs in STATE; see ops.ShortConvOp."""
    from ....attention.numba_paged.operations import fetch_add, peek
    from .recurrences import CHANNELS, begin, convolve, entry

    number, item = KINDS.index(kind), item_bytes(kind)
    bends, adds, gates = int(silu), int(has_bias), int(is_gated)
    whole, rest = divmod(channels, CHANNELS)
    groups = whole + (rest > 0)
    units = -(-groups // GROUPS)

    def kernel(a: Any) -> None:
        weight, bias, state, step = (
            peek(a + 8 * WEIGHT),
            peek(a + 8 * BIAS),
            peek(a + 8 * STATE),
            peek(a + 8 * SLOT_STEP),
        )
        x, x_step, out, width = peek(a + 8 * X), peek(a + 8 * X_STEP), peek(a + 8 * OUT), channels * item
        before, before_step = peek(a + 8 * BEFORE), peek(a + 8 * BEFORE_STEP)
        after, after_step = peek(a + 8 * AFTER), peek(a + 8 * AFTER_STEP)
        total = peek(peek(a + 8 * TABLE)) * units
        while True:
            unit = fetch_add(a + 8 * NEXT, 1)
            if unit >= total:
                return
            row, first = unit // units, unit % units * GROUPS
            for group in range(first, min(first + GROUPS, groups)):
                at = group * CHANNELS * item
                start, source = begin(a, TOKEN_ENDS, row), entry(a, SOURCES, row)
                for segment in range(begin(a, SEGMENT_ENDS, row), entry(a, SEGMENT_ENDS, row)):
                    end, target = entry(a, ENDS, segment), entry(a, TARGETS, segment)
                    x_at, out_at = x + start * x_step + at, out + start * width + at
                    before_at, after_at = before + start * before_step + at, after + start * after_step + at
                    from_state, to_state = state + source * step + at, state + target * step + at
                    if group < whole:
                        convolve(
                            CHANNELS, taps, number, bends, adds, gates, weight + at, width, bias + at, x_at, x_step,
                            before_at, before_step, after_at, after_step, out_at, width, from_state, to_state,
                            end - start,
                        )  # fmt: skip
                    else:
                        convolve(
                            rest, taps, number, bends, adds, gates, weight + at, width, bias + at, x_at, x_step,
                            before_at, before_step, after_at, after_step, out_at, width, from_state, to_state,
                            end - start,
                        )  # fmt: skip
                    start, source = end, target

    return kernel


def _parts_of(size: int, row_bytes: int) -> int:
    """The fewest equal parts of so many rows that take at most STATE_BYTES each; 1 if there are no equal ones."""
    fewest = max(1, -(-size * row_bytes // STATE_BYTES))
    return next((parts for parts in range(fewest, size + 1) if size % parts == 0 and size // parts >= LEAST_PART), 1)


LEAST_PART = 16
"""Rows or columns of the smallest part of a state."""


@kernel_builder
def delta_kernel(
    key_heads: int, value_heads: int, key_size: int, value_size: int, kind: str, *, by_channel: bool, step_scale: float
) -> KernelFunction:
    """OUT = the gated delta rule of X (q, k and v), A and B; see ops.GatedDeltaOp."""
    from ....attention.numba_paged.operations import fetch_add, peek, peek_float
    from .recurrences import apply_delta, begin, entry, peek_number, poke_float, scratch, softplus, unit_row

    number, item = KINDS.index(kind), item_bytes(kind)
    blocks = _parts_of(value_size, 4 * key_size)
    columns, repeats = value_size // blocks, value_heads // key_heads
    scale, one, beta_scale = np.float32(key_size**-0.5), np.float32(1.0), np.float32(step_scale)
    row_step, head_step = 4 * value_size, 4 * key_size * value_size
    decays = key_size if by_channel else 1
    key_bytes, floats = 4 * key_size, 12 * key_size

    def kernel(a: Any) -> None:
        x, x_step, out = peek(a + 8 * X), peek(a + 8 * X_STEP), peek(a + 8 * OUT)
        state, slot_step = peek(a + 8 * STATE), peek(a + 8 * SLOT_STEP)
        q = scratch(floats)
        k, decay = q + key_bytes, q + 2 * key_bytes
        total = peek(peek(a + 8 * TABLE)) * value_heads * blocks
        while True:
            unit = fetch_add(a + 8 * NEXT, 1)
            if unit >= total:
                return
            row, rest = unit // (value_heads * blocks), unit % (value_heads * blocks)
            head, column = rest // blocks, rest % blocks * columns
            from_head = head // repeats * key_size
            offset = head * head_step + 4 * column
            rate = peek_float(peek(a + 8 * RATE) + 4 * head)
            source = state + entry(a, SOURCES, row) * slot_step + offset
            start = begin(a, TOKEN_ENDS, row)
            for segment in range(begin(a, SEGMENT_ENDS, row), entry(a, SEGMENT_ENDS, row)):
                end, target = entry(a, ENDS, segment), state + entry(a, TARGETS, segment) * slot_step + offset
                for token in range(start, end):
                    at = x + token * x_step
                    unit_row(key_size, number, at + from_head * item, NORM_EPS, scale, q)
                    unit_row(key_size, number, at + (key_heads * key_size + from_head) * item, NORM_EPS, one, k)
                    last = np.float32(0.0)
                    for channel in range(decays):
                        i = head * decays + channel
                        step = peek_number(number, peek(a + 8 * A) + token * peek(a + 8 * A_STEP) + i * item)
                        step = softplus(step + peek_float(peek(a + 8 * DT_BIAS) + 4 * i))
                        last = np.float32(math.exp(-rate * step))
                        poke_float(decay + 4 * channel, last)
                    for channel in range(decays, key_size):
                        poke_float(decay + 4 * channel, last)
                    b = peek_number(number, peek(a + 8 * B) + token * peek(a + 8 * B_STEP) + head * item)
                    beta = beta_scale / (one + np.float32(math.exp(-b)))
                    value = at + (2 * key_heads * key_size + head * value_size + column) * item
                    found = out + ((token * value_heads + head) * value_size + column) * item
                    apply_delta(key_size, columns, number, source, target, row_step, q, k, decay, beta, value, found)
                    source = target
                start = end

    return kernel


@kernel_builder
def ssd_kernel(
    heads: int, head_size: int, groups: int, state_size: int, kind: str, limits: tuple[float, float]
) -> KernelFunction:
    """OUT = Mamba 2's scan of X (x, B and C) and A (Δ); see ops.SsdOp."""
    from ....attention.numba_paged.operations import copy_row, fetch_add, peek, peek_float
    from .recurrences import apply_scan, begin, entry, peek_number, scratch, softplus

    number, item = KINDS.index(kind), item_bytes(kind)
    blocks = _parts_of(head_size, 4 * state_size)
    size, repeats = head_size // blocks, heads // groups
    width, head_step = heads * head_size, 4 * head_size * state_size
    key_bytes, floats = 4 * state_size, 8 * state_size
    least, most = np.float32(limits[0]), np.float32(limits[1])

    def kernel(a: Any) -> None:
        x, x_step, out = peek(a + 8 * X), peek(a + 8 * X_STEP), peek(a + 8 * OUT)
        state, slot_step = peek(a + 8 * STATE), peek(a + 8 * SLOT_STEP)
        b = scratch(floats)
        c = b + key_bytes
        total = peek(peek(a + 8 * TABLE)) * heads * blocks
        while True:
            unit = fetch_add(a + 8 * NEXT, 1)
            if unit >= total:
                return
            row, rest = unit // (heads * blocks), unit % (heads * blocks)
            head, first = rest // blocks, rest % blocks * size
            group, offset = head // repeats * state_size, head * head_step + 4 * first * state_size
            rate, bias = peek_float(peek(a + 8 * RATE) + 4 * head), peek_float(peek(a + 8 * DT_BIAS) + 4 * head)
            skip = peek_float(peek(a + 8 * SKIP) + 4 * head)
            source = state + entry(a, SOURCES, row) * slot_step + offset
            start = begin(a, TOKEN_ENDS, row)
            for segment in range(begin(a, SEGMENT_ENDS, row), entry(a, SEGMENT_ENDS, row)):
                end, target = entry(a, ENDS, segment), state + entry(a, TARGETS, segment) * slot_step + offset
                for token in range(start, end):
                    at = x + token * x_step
                    copy_row(state_size, number, 0, at + (width + group) * item, b)
                    copy_row(state_size, number, 0, at + (width + (groups * state_size) + group) * item, c)
                    step = peek_number(number, peek(a + 8 * A) + token * peek(a + 8 * A_STEP) + head * item)
                    step = softplus(step + bias)
                    if end - start > 1:
                        step = min(max(step, least), most)
                    decay = np.float32(math.exp(-rate * step))
                    own = (head * head_size + first) * item
                    found = out + token * width * item + own
                    apply_scan(size, state_size, number, source, target, at + own, b, c, decay, step, skip, found)
                    source = target
                start = end

    return kernel


@kernel_builder
def gated_norm_kernel(width: int, size: int, kind: str, *, norms_first: bool) -> KernelFunction:
    """OUT = the norm of each ``size`` numbers of X × WEIGHT, with the gate silu(Z); see ops.GatedNormOp."""
    from ....attention.numba_paged.operations import fetch_add, peek, peek_float
    from .recurrences import gated_norm_row

    number, item, gates_last = KINDS.index(kind), item_bytes(kind), int(norms_first)

    def kernel(a: Any) -> None:
        x, x_step, out, weight = peek(a + 8 * X), peek(a + 8 * X_STEP), peek(a + 8 * OUT), peek(a + 8 * WEIGHT)
        z, z_step, eps = peek(a + 8 * Z), peek(a + 8 * Z_STEP), peek_float(a + 8 * EPS)
        while True:
            first = fetch_add(a + 8 * NEXT, AT_ONCE)
            if first >= peek(a + 8 * COUNT):
                return
            for row in range(first, min(first + AT_ONCE, peek(a + 8 * COUNT))):
                for group in range(width // size):
                    at = group * size * item
                    y_at, z_at, out_at = x + row * x_step + at, z + row * z_step + at, out + row * width * item + at
                    gated_norm_row(size, number, gates_last, y_at, z_at, weight + at, eps, out_at)

    return kernel


@kernel_builder
def gate_by_kernel(width: int, kind: str, *, silu: bool) -> KernelFunction:
    """OUT = X × silu(Z), or × σ(Z); see ops.GateOp."""
    from ....attention.numba_paged.operations import fetch_add, peek
    from .recurrences import multiply_gate

    number, item, bends = KINDS.index(kind), item_bytes(kind), int(silu)

    def kernel(a: Any) -> None:
        x, x_step, out = peek(a + 8 * X), peek(a + 8 * X_STEP), peek(a + 8 * OUT)
        z, z_step = peek(a + 8 * Z), peek(a + 8 * Z_STEP)
        while True:
            first = fetch_add(a + 8 * NEXT, AT_ONCE)
            if first >= peek(a + 8 * COUNT):
                return
            for row in range(first, min(first + AT_ONCE, peek(a + 8 * COUNT))):
                multiply_gate(width, number, bends, x + row * x_step, z + row * z_step, out + row * width * item)

    return kernel
