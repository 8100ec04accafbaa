"""Token embedding and LM head; tied models share one matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .linear import Linear


class Embedding:
    """One row per token id."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.dtype = dtype

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, hidden_size]"""
        return F.embedding(input_ids, self.weight).to(self.dtype)

    def read_from(self, rows: torch.Tensor) -> None:
        """Give the own matrix up and look tokens up in this one: the same numbers, in any float dtype."""
        assert rows.shape == self.weight.shape
        self.weight = rows

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
        self.linear = Linear(
            hidden_size,
            {"lm_head": vocab_size},
            bias=False,
            dtype=dtype,
            device=device,
            shared=tied_to.weight if tied_to is not None else None,
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> float32 [rows, vocab_size], contiguous: sampling reads whole rows."""
        return self.linear(hidden).to(torch.float32)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        return {} if self.is_tied else self.linear.checkpoint_views("")
