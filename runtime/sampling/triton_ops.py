"""The sampling operations as single Triton kernels: the same as `ops`, with the noise in registers.

Imported on GPUs, and by tests that run it in Triton's interpreter.

One program works on one row, so that a row's result depends on no other row. The integers of the noise are those of
`noise.py`, bit for bit; exponentials and logarithms are the device's own and may differ in their last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...scheduler.constraints.constraint import TokenMasks
from . import ops as torch_ops
from .mask_ops import LARGEST_ALLOWED, apply_masks_on_device, upload_masks
from .ops import Filters
from .ranking import CHUNK, chunk_maxima, top_tokens

BLOCK = 4096
"""Tokens that a program of `draw_all` or `row_statistics` reads at a time."""

MIN_WIDTH, MAX_WIDTH = 64, 4096
"""Widths that `draw_ranked` has kernels for: one for each power of two; beyond them torch draws."""

# Slices of packed tensors begin anywhere: without this, Triton would compile a kernel for each alignment it meets.
ANY_ALIGNMENT = ["values", "ids", "temperature", "top_k", "top_p", "log_min_p", "keys", "drawn"]

MAX_CHUNKED_WIDTH = 256
"""Most tokens that `draw_top_k` finds by chunks; more are ranked by torch."""

MAX_CHUNKED_VOCAB = 2**18


def draw_top_k(logits: torch.Tensor, width: int, filters: Filters, keys: torch.Tensor) -> torch.Tensor:
    """As `ops.draw_top_k`. Nothing is sorted: counts and sums find the cuts of top_k and top_p, bit by bit."""
    rows, vocab_size = logits.shape
    fewest = CHUNK * max(MIN_WIDTH, 2 * width)  # so that there are as many chunks as are chosen
    if not fewest <= vocab_size <= MAX_CHUNKED_VOCAB or width > MAX_CHUNKED_WIDTH:
        return draw_ranked(*top_tokens(logits, width), filters, keys)
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        logits = logits.contiguous()
        maxima = chunk_maxima(logits, CHUNK)
        block = max(MIN_WIDTH, _power_of_two(width))
        chunks = maxima.shape[1]
        chosen = torch.empty(rows, block, dtype=torch.int32, device=logits.device)
        _choose_chunks[(rows,)](
            maxima,
            chosen,
            chunks,  # pyright: ignore[reportArgumentType]
            _power_of_two(chunks),  # pyright: ignore[reportArgumentType]
            block,  # pyright: ignore[reportArgumentType]
            num_warps=8,  # pyright: ignore[reportCallIssue]
        )
        _draw_top_k[(rows,)](
            logits,
            chosen,
            filters.temperature,
            filters.top_k,
            filters.top_p,
            filters.log_min_p,
            keys,
            drawn,
            vocab_size,  # pyright: ignore[reportArgumentType]
            CHUNK,  # pyright: ignore[reportArgumentType]
            block,  # pyright: ignore[reportArgumentType]
            num_warps=block // 8,  # pyright: ignore[reportCallIssue]
        )
    return drawn


def draw_ranked(values: torch.Tensor, ids: torch.Tensor, filters: Filters, keys: torch.Tensor) -> torch.Tensor:
    """See `ops.draw_ranked`."""
    width = values.shape[1]
    if width > MAX_WIDTH:
        return torch_ops.draw_ranked(values, ids, filters, keys)
    drawn = torch.empty(len(values), dtype=torch.int64, device=values.device)
    if len(values):
        block = max(MIN_WIDTH, _power_of_two(width))
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
    """See `ops.draw_all`."""
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
            block=min(BLOCK, _power_of_two(logits.shape[1])),  # pyright: ignore[reportArgumentType]
            num_warps=32,  # pyright: ignore[reportCallIssue]
        )
    return drawn


def draw_nucleus(logits: torch.Tensor, filters: Filters, keys: torch.Tensor) -> torch.Tensor:
    """See `ops.draw_nucleus_by_sort`. Masses are summed in float64, but are float32 themselves."""
    weights = torch_ops.weigh(logits, filters)
    if len(logits):
        _cut_nucleus[(len(logits),)](
            weights,
            filters.top_p,
            weights.shape[1],  # pyright: ignore[reportArgumentType]
            min(BLOCK, _power_of_two(weights.shape[1])),  # pyright: ignore[reportArgumentType]
            num_warps=32,  # pyright: ignore[reportCallIssue]
        )
    return draw_all(logits, filters, keys, weights)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


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
    ratio = _ratio(scaled, kept, token, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
    winner = tl.min(tl.where(ratio == tl.max(ratio, 0), place, block), 0)
    tl.store(drawn + row, tl.load(ids + first + winner))


@triton.jit
def _choose_chunks(
    maxima,
    chosen,
    chunks: tl.constexpr,
    chunk_block: tl.constexpr,
    block: tl.constexpr,
):
    """Store the numbers of the ``block`` chunks with the highest maxima, ascending."""
    row = tl.program_id(0)
    number = tl.arange(0, chunk_block)
    inside = number < chunks
    order = _order(tl.load(maxima + row.to(tl.int64) * chunks + number, mask=inside, other=0.0))
    picked = _first(order, inside, block)
    place = tl.cumsum(picked.to(tl.int32), 0) - 1
    tl.store(chosen + row * block + place, number, mask=picked)


@triton.jit(do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _draw_top_k(
    logits,
    chosen,
    temperature,
    top_k,
    top_p,
    log_min_p,
    keys,
    drawn,
    vocab_size: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
):
    """chosen: int32 [rows, block], numbers of the chunks that hold the tokens, ascending."""
    row = tl.program_id(0)
    place = tl.arange(0, block * chunk)
    token = tl.load(chosen + row * block + place // chunk) * chunk + place % chunk
    inside = token < vocab_size
    value = tl.load(logits + row.to(tl.int64) * vocab_size + token, mask=inside, other=-float("inf"))
    best = tl.max(tl.where(value == value, value, -float("inf")), 0)
    scaled = _scale(value, best, tl.load(temperature + row))
    order = _order(value)
    in_top_k = _first(order, inside, tl.load(top_k + row).to(tl.int32))
    mass = tl.where(in_top_k & (value == value), tl.exp(scaled.to(tl.float64)), 0.0)
    in_top_p = _first_mass(order, mass, tl.load(top_p + row) * tl.sum(mass, 0))
    kept = in_top_k & in_top_p & (scaled >= tl.load(log_min_p + row))
    ratio = _ratio(scaled, kept, token, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
    winner = tl.min(tl.where(ratio == tl.max(ratio, 0), token, vocab_size), 0)
    tl.store(drawn + row, tl.minimum(winner, vocab_size - 1).to(tl.int64))


@triton.jit
def _order(value):
    """int64 in [0, 2^32): larger for larger float32 values."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _first(order, inside, count):
    """Mask of the first ``count`` elements, by order and, in a tie, by place. At least so many are inside."""
    # The order of the last of them is the largest that ``count`` elements reach.
    last, step = tl.zeros([], tl.int64), tl.full([], 2147483648, tl.int64)
    for _ in range(32):
        higher = last + step
        step = step >> 1
        reached = tl.sum((inside & (order >= higher)).to(tl.int32), 0)
        last = tl.where(reached >= count, higher, last)
    before = inside & (order > last)
    ties = (inside & (order == last)).to(tl.int32)
    left = count - tl.sum(before.to(tl.int32), 0)
    return before | ((ties > 0) & (tl.cumsum(ties, 0) <= left))


@triton.jit
def _first_mass(order, mass, wanted):
    """Mask of the first elements, by order and place, until their masses (float64, >= 0) add up to ``wanted``."""
    last, step = tl.zeros([], tl.int64), tl.full([], 2147483648, tl.int64)
    for _ in range(32):
        higher = last + step
        step = step >> 1
        last = tl.where(tl.sum(tl.where(order >= higher, mass, 0.0), 0) >= wanted, higher, last)
    tied = tl.where(order == last, mass, 0.0)
    before = tl.sum(tl.where(order > last, mass, 0.0), 0)
    return (order > last) | ((order == last) & (before + tl.cumsum(tied, 0) - tied < wanted))


@triton.jit(do_not_specialize_on_alignment=["top_p"])
def _cut_nucleus(weights, top_p, vocab_size: tl.constexpr, block: tl.constexpr):
    """weights: float32 [rows, vocab], in [0, 1]. Those that top_p drops become 0."""
    row = tl.program_id(0)
    mine = weights + row.to(tl.int64) * vocab_size
    wanted = tl.load(top_p + row) * _mass_from(mine, 0, vocab_size, block)
    # The bits of the least weight that is kept: the largest from which upwards the masses add up to ``wanted``.
    last, step = tl.zeros([], tl.int32), tl.full([], 536870912, tl.int32)  # 2^29; the bits of 1.0 are below 2^30
    for _ in range(30):
        higher = last + step
        step = step >> 1
        last = tl.where(_mass_from(mine, higher, vocab_size, block) >= wanted, higher, last)
    before = _mass_from(mine, last + 1, vocab_size, block)
    for start in range(0, vocab_size, block):
        token = start + tl.arange(0, block)
        weight = tl.load(mine + token, mask=token < vocab_size, other=0.0)
        bits = weight.to(tl.int32, bitcast=True)
        tied = tl.where(bits == last, weight.to(tl.float64), 0.0)
        kept = (bits > last) | ((bits == last) & (before + tl.cumsum(tied, 0) - tied < wanted))
        tl.store(mine + token, tl.where(kept, weight, 0.0), mask=token < vocab_size)
        before += tl.sum(tied, 0)


@triton.jit
def _mass_from(weights, least, vocab_size: tl.constexpr, block: tl.constexpr):
    """Sum of the weights with bits of at least ``least``, float64."""
    mass = tl.zeros([block], tl.float64)
    for start in range(0, vocab_size, block):
        token = start + tl.arange(0, block)
        weight = tl.load(weights + token, mask=token < vocab_size, other=0.0)
        mass += tl.where(weight.to(tl.int32, bitcast=True) >= least, weight.to(tl.float64), 0.0)
    return tl.sum(mass, 0)


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
        ratio = _ratio(scaled, keeps, token, multiplier, offset)
        wins = ratio > best_ratio
        best_ratio = tl.where(wins, ratio, best_ratio)
        best_token = tl.where(wins, token, best_token)
    winner = tl.min(tl.where(best_ratio == tl.max(best_ratio, 0), best_token, vocab_size), 0)
    tl.store(drawn + row, winner.to(tl.int64))


@triton.jit
def _scale(value, best, temperature):
    """Distance to the likeliest token, by temperature; 0 for that token, even if it is infinite."""
    return tl.where(value == best, 0.0, tl.math.div_rn(value - best, temperature))


@triton.jit
def _ratio(scaled, kept, token, multiplier, offset):
    """The ratio that decides the race: p / noise, -1 for tokens that are not kept. A NaN never wins."""
    ratio = tl.math.div_rn(tl.exp(scaled), _noise(token, multiplier, offset))
    return tl.where(kept & (ratio == ratio), ratio, -1.0)


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


def row_statistics(logits: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ranking.row_statistics`; reads the logits once.

    The softmax's sum is kept relative to the likeliest token so far, and scaled down when a likelier one turns up
    (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
    """
    rows, vocab_size = logits.shape
    chunks = -(-vocab_size // chunk)
    maxima = torch.empty(rows, chunks, device=logits.device)
    best, log_sum = torch.empty(2, rows, device=logits.device).unbind(0)
    if rows:
        _survey[(rows,)](
            logits.contiguous(),
            maxima,
            best,
            log_sum,
            vocab_size,  # pyright: ignore[reportArgumentType]
            chunks,  # pyright: ignore[reportArgumentType]
            chunk,  # pyright: ignore[reportArgumentType]
            max(1, BLOCK // chunk),  # pyright: ignore[reportArgumentType]
            num_warps=16,  # pyright: ignore[reportCallIssue]
        )
    return maxima, best, log_sum


@triton.jit(do_not_specialize_on_alignment=["best", "log_sum"])
def _survey(
    logits,
    maxima,
    best,
    log_sum,
    vocab_size: tl.constexpr,
    chunks: tl.constexpr,
    chunk: tl.constexpr,
    chunks_at_once: tl.constexpr,
):
    row = tl.program_id(0)
    likeliest = tl.full([], -float("inf"), tl.float32)
    broken = tl.zeros([], tl.int32)
    total = tl.zeros([chunks_at_once, chunk], tl.float32)  # of exp(logit - likeliest), as far as that is known
    for start in range(0, chunks, chunks_at_once):
        number = start + tl.arange(0, chunks_at_once)
        token = number[:, None] * chunk + tl.arange(0, chunk)[None, :]
        value = tl.load(logits + row.to(tl.int64) * vocab_size + token, mask=token < vocab_size, other=-float("inf"))
        of_chunk = tl.max(value, 1)
        tl.store(maxima + row.to(tl.int64) * chunks + number, of_chunk, mask=number < chunks)
        broken = tl.maximum(broken, tl.max(tl.max((value != value).to(tl.int32), 1), 0))
        higher = tl.maximum(likeliest, tl.max(of_chunk, 0))
        # Nothing but -inf so far: any finite number will do, as all powers are 0.
        at = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(tl.where(likeliest == higher, 0.0, likeliest - at)) + tl.exp(value - at)
        likeliest = higher
    tl.store(best + row, tl.where(broken > 0, float("nan"), likeliest))
    tl.store(log_sum + row, tl.log(tl.sum(tl.sum(total, 1), 0)))


# -- masks of grammars -------------------------------------------------------------------------------------------------


def apply_masks(logits: torch.Tensor, masks: TokenMasks, finite: bool) -> None:
    """As `mask_ops.apply_masks_on_device`; the masks stay packed."""
    if not logits.is_contiguous():
        apply_masks_on_device(logits, masks, finite)
        return
    vocab_size = logits.shape[1]
    rows, mask_of, packed = upload_masks(masks, vocab_size, logits.device)
    _apply_masks[(len(rows), triton.cdiv(vocab_size, BLOCK))](
        logits,
        rows,
        mask_of,
        packed,
        vocab_size,  # pyright: ignore[reportArgumentType]
        packed.shape[1],  # pyright: ignore[reportArgumentType]
        finite,  # pyright: ignore[reportArgumentType]
        LARGEST_ALLOWED,  # pyright: ignore[reportArgumentType]
        BLOCK,  # pyright: ignore[reportArgumentType]
    )


@triton.jit(do_not_specialize_on_alignment=["rows", "mask_of", "packed"])
def _apply_masks(
    logits,
    rows,
    mask_of,
    packed,
    vocab_size,
    num_words,
    finite: tl.constexpr,
    largest: tl.constexpr,
    block: tl.constexpr,
):
    row, mask = tl.load(rows + tl.program_id(0)), tl.load(mask_of + tl.program_id(0))
    token = tl.program_id(1) * block + tl.arange(0, block)
    inside = token < vocab_size
    word = tl.load(packed + mask * num_words + token // 32, mask=inside, other=0)
    place = logits + row * vocab_size + token
    value = tl.load(place, mask=inside, other=0.0)
    if finite:
        value = tl.where(value != value, -largest, value)
        value = tl.minimum(tl.maximum(value, -largest), largest)
    allowed = ((word >> (token % 32)) & 1) == 1
    tl.store(place, tl.where(allowed, value, float("-inf")), mask=inside)
