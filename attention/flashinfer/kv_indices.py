"""Gathers the page numbers of many sequences side by side, from the device's own copy of req_to_token."""

from __future__ import annotations

import torch


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
    """Write the pages of sequence i to out[kv_indptr[i] : kv_indptr[i + 1]].

    req_to_token: int32 [rows, max_context]; rows, starts: int32 [n], each sequence's row and the position where it
    begins, a multiple of page_size; kv_indptr: int32 [n + 1]; out: int32 [kv_indptr[n]]. most_pages: the most pages of
    one sequence; a kernel needs it on the host to size its grid. This is the oracle of triton_kv_indices.py.
    """
    counts = kv_indptr[1:] - kv_indptr[:-1]
    sequence = torch.repeat_interleave(counts, output_size=len(out))  # with the length given, nothing waits for it
    page = torch.arange(len(out), dtype=torch.int32, device=out.device) - kv_indptr[sequence]
    slots = req_to_token[rows[sequence].long(), (starts[sequence] + page * page_size).long()]
    torch.div(slots, page_size, rounding_mode="floor", out=out)
