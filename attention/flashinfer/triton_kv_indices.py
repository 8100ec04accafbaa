"""Gathers the page numbers of many sequences in one Triton kernel. Imported only where there is a GPU (or Triton's
interpreter)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 512
"""Pages per program."""

# These are slices of packed tensors. Without this, Triton would recompile the kernel when their alignment changes.
ANY_ALIGNMENT = ["rows", "starts", "kv_indptr", "out"]


def build_kv_indices(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    kv_indptr: torch.Tensor,
    out: torch.Tensor,
    *,
    page_size: int,
    most_pages: int,
) -> None:
    """See `library.build_kv_indices`."""
    grid = (len(rows), triton.cdiv(most_pages, BLOCK))
    _build[grid](req_to_token, rows, starts, kv_indptr, out, req_to_token.stride(0), page_size, block=BLOCK)  # pyright: ignore[reportArgumentType]


@triton.jit(do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _build(req_to_token, rows, starts, kv_indptr, out, row_stride, page_size, block: tl.constexpr):
    sequence = tl.program_id(0)
    begin = tl.load(kv_indptr + sequence)
    count = tl.load(kv_indptr + sequence + 1) - begin
    page = tl.program_id(1) * block + tl.arange(0, block)
    row = tl.load(rows + sequence).to(tl.int64)
    position = tl.load(starts + sequence) + page * page_size
    slot = tl.load(req_to_token + row * row_stride + position, mask=page < count, other=0)
    tl.store(out + begin + page, slot // page_size, mask=page < count)
