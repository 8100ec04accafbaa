"""The row statistics that beam searches need, in one kernel that reads the logits once. Imported on GPUs, and by tests
that run it in Triton's interpreter.

The softmax's sum is kept relative to the likeliest token so far, and scaled down when a likelier one turns up
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). One program surveys one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Tokens that a program looks at in one go."""


def row_statistics(logits: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ranking.row_statistics`."""
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
