"""The k best tokens in a total order: higher logit first, then lower token id.

`torch.topk` breaks ties as it likes, and differently for another k. bf16 models tie all the time, so an answer would
depend on what else is in the batch. Here logit and id are packed into one int64, so no two keys are equal.
"""

from __future__ import annotations

import torch

SLICE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Logits to work on at once, by device type: bounds temporary memory, and keeps it in the cache of a CPU."""


def top_tokens(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``k`` tokens of each row: logits float32 [n, k], descending, and token ids int64 [n, k].

    logits: float32 [n, vocab]. One partial selection, no full sort; k = vocab sorts. -0.0 ranks below 0.0.
    """
    vocab_size = logits.shape[-1]
    bits = logits.contiguous().view(torch.int32)
    # Floats order like their bits, except that negative ones run backwards.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    reversed_ids = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = (ordered.to(torch.int64) << 32) | reversed_ids
    best = keys.topk(min(k, vocab_size), dim=-1, sorted=True).values
    ids = (vocab_size - 1) - (best & 0xFFFFFFFF)
    return logits.gather(-1, ids), ids
