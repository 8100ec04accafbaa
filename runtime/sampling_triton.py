"""Draws as single kernels: the twins of `draws.py`, with the noise in registers. Imported on GPUs, and by tests that
run it in Triton's interpreter.

One program draws one row, so that what a row gets depends on no other. The integers of the noise are those of
`noise.py`, bit for bit; exponentials and logarithms are the device's own and may differ in their last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import draws
from .draws import Filters

BLOCK = 4096
"""Tokens that a program of `draw_all` looks at in one go."""

MIN_WIDTH, MAX_WIDTH = 64, 4096
"""Ranked tokens that a kernel of `draw_ranked` is made for: a kernel for each power of two, torch beyond."""

# Slices of packed tensors begin anywhere: without this, each way they lie would be compiled when it first occurs.
ANY_ALIGNMENT = ["values", "ids", "temperature", "top_k", "top_p", "log_min_p", "keys", "drawn"]


def draw_ranked(values: torch.Tensor, ids: torch.Tensor, filters: Filters, keys: torch.Tensor) -> torch.Tensor:
    """See `draws.draw_ranked`."""
    width = values.shape[1]
    if width > MAX_WIDTH:
        return draws.draw_ranked(values, ids, filters, keys)
    drawn = torch.empty(len(values), dtype=torch.int64, device=values.device)
    if len(values):
        block = max(MIN_WIDTH, triton.next_power_of_2(width))
        _draw_ranked[(len(values),)](
            values.contiguous(),
            ids.contiguous(),
            filters.temperature,
            filters.top_k,
            filters.top_p,
            filters.log_min_p,
            keys,
            drawn,
            width,
            block=block,  # pyright: ignore[reportArgumentType]
            num_warps=min(16, max(1, block // 256)),  # pyright: ignore[reportCallIssue]
        )
    return drawn


def draw_all(
    logits: torch.Tensor, filters: Filters, keys: torch.Tensor, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """See `draws.draw_all`."""
    drawn = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        _draw_all[(len(logits),)](
            logits.contiguous(),
            filters.temperature,
            filters.log_min_p,
            keys,
            logits if kept is None else kept.contiguous(),
            drawn,
            logits.shape[1],  # pyright: ignore[reportArgumentType]
            filtered=kept is not None,  # pyright: ignore[reportArgumentType]
            block=min(BLOCK, triton.next_power_of_2(logits.shape[1])),  # pyright: ignore[reportArgumentType]
            num_warps=16,  # pyright: ignore[reportCallIssue]
        )
    return drawn


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _draw_ranked(
    values,
    ids,
    temperature,
    top_k,
    top_p,
    log_min_p,
    keys,
    drawn,
    width,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    first = row * width
    place = tl.arange(0, block)
    inside = place < width
    value = tl.load(values + first + place, mask=inside, other=-float("inf"))
    token = tl.load(ids + first + place, mask=inside, other=0).to(tl.int32)
    scaled = _scale(value, tl.load(values + first), tl.load(temperature + row))
    in_top_k = inside & (place < tl.load(top_k + row))
    mass = tl.where(in_top_k, tl.exp(scaled.to(tl.float64)), 0.0)
    cumulative = tl.cumsum(mass, 0)
    wanted = tl.load(top_p + row) * tl.sum(mass, 0)
    kept = in_top_k & ((cumulative - mass) < wanted) & (scaled >= tl.load(log_min_p + row))
    kept = kept | (place == 0)
    ratio = tl.math.div_rn(tl.exp(scaled), _noise(token, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)))
    ratio = tl.where(kept & (ratio == ratio), ratio, -1.0)  # a NaN never wins
    winner = tl.min(tl.where(ratio == tl.max(ratio, 0), place, block), 0)
    tl.store(drawn + row, tl.load(ids + first + winner))


@triton.jit(do_not_specialize_on_alignment=["temperature", "log_min_p", "keys", "drawn"])
def _draw_all(
    logits,
    temperature,
    log_min_p,
    keys,
    kept,
    drawn,
    vocab_size: tl.constexpr,
    filtered: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    first = row.to(tl.int64) * vocab_size
    lane = tl.arange(0, block)
    likeliest = tl.full([block], -float("inf"), tl.float32)
    for start in range(0, vocab_size, block):
        token = start + lane
        value = tl.load(logits + first + token, mask=token < vocab_size, other=-float("inf"))
        likeliest = tl.where(value > likeliest, value, likeliest)  # never a NaN
    best = tl.max(likeliest, 0)

    warmth = tl.load(temperature + row)
    floor = tl.load(log_min_p + row)
    multiplier = tl.load(keys + 2 * row)
    offset = tl.load(keys + 2 * row + 1)
    # Each lane keeps its best token so far, the earliest where they tie.
    best_ratio = tl.full([block], -1.0, tl.float32)
    best_token = tl.zeros([block], tl.int32)
    for start in range(0, vocab_size, block):
        token = start + lane
        value = tl.load(logits + first + token, mask=token < vocab_size, other=-float("inf"))
        scaled = _scale(value, best, warmth)
        keeps = (token < vocab_size) & (scaled >= floor)
        if filtered:
            keeps = keeps & (tl.load(kept + first + token, mask=token < vocab_size, other=0.0) > 0.0)
        ratio = tl.where(keeps, tl.math.div_rn(tl.exp(scaled), _noise(token, multiplier, offset)), -1.0)
        wins = ratio > best_ratio
        best_ratio = tl.where(wins, ratio, best_ratio)
        best_token = tl.where(wins, token, best_token)
    winner = tl.min(tl.where(best_ratio == tl.max(best_ratio, 0), best_token, vocab_size), 0)
    tl.store(drawn + row, winner.to(tl.int64))


@triton.jit
def _scale(value, best, temperature):
    """The likeliest token is at 0, also where it is infinite."""
    return tl.where(value == best, 0.0, tl.math.div_rn(value - best, temperature))


@triton.jit
def _hash(token, multiplier, offset):
    """int32: the bits of noise.exponential_noise."""
    h = token * (multiplier | 1)
    h = h + offset
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * -2048144789
    h = h ^ ((h >> 13) & 0x7FFFF)
    h = h * -1028477387
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def _noise(token, multiplier, offset):
    """float32 Exp(1) noise of int32 tokens."""
    uniform = ((_hash(token, multiplier, offset) & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    uniform = tl.minimum(uniform, 0.9999999403953552)  # 1 - 2^-24
    # -log1p(-u), from a logarithm alone: the rounding of 1 - u cancels in the quotient (Kahan).
    rest = 1.0 - uniform
    return tl.where(rest == 1.0, uniform, uniform * tl.math.div_rn(tl.log(rest), rest - 1.0))
