"""Finds the nucleus with FlashInfer's kernel, which is compiled at first use (nvcc). Imported on GPUs only.

Reproducible: it cuts by integer sums, row by row, so that what a row gets depends on no other row, nor on the order in
which the GPU works.
"""

from __future__ import annotations

import torch
from flashinfer.sampling import top_p_renorm_probs  # pyright: ignore[reportMissingImports]

from .ops import DrawAllOp, Filters, draw_nucleus_by_sort, weigh

MIN_VOCAB = 2048
"""Below this, FlashInfer finds the cut in another way, which is not exact, and sorting costs next to nothing."""


def draw_nucleus(logits: torch.Tensor, filters: Filters, keys: torch.Tensor, *, draw_all: DrawAllOp) -> torch.Tensor:
    """As `ops.draw_nucleus_by_sort`, but all tokens that tie where the nucleus ends are kept, and the
    sum that ends it is rounded to float32."""
    if logits.shape[-1] < MIN_VOCAB:
        return draw_nucleus_by_sort(logits, filters, keys)
    kept = top_p_renorm_probs(weigh(logits, filters), filters.top_p.float(), is_deterministic=True)
    return draw_all(logits, filters, keys, kept)
