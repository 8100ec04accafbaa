"""Token embedding and LM head; tied models share one matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .linear import project


class Embedding:
    """One row per token id."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, hidden_size]"""
        return F.embedding(input_ids, self.weight)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}.weight": self.weight}


class LMHead:
    """Hidden states -> logits. ``tied_to``: an embedding whose matrix it shares, instead of having its own."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: Embedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.is_tied = tied_to is not None
        self.weight = tied_to.weight if tied_to else torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> float32 [rows, vocab_size], contiguous: sampling reads whole rows."""
        return project(hidden, self.weight).to(torch.float32)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return {} if self.is_tied else {f"{prefix}.weight": self.weight}
