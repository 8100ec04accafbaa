"""Token embedding and LM head; tied models share one matrix."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from .linear import Linear
from .norm import RMSNorm
from .ops import Ops


class LogitsProduct(Protocol):
    """The head's product where it is not that of a `Linear`, which rounds to the model's dtype."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, /) -> torch.Tensor:
        """x: float32 [rows, hidden_size]; weight: [vocab_size, hidden_size], in the model's dtype -> float32
        [rows, vocab_size], contiguous."""
        ...


def widened_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See LogitsProduct. Copies the weight each time."""
    return F.linear(x, weight.float())


class Embedding:
    """One row per token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, ops: Ops, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._ops = ops
        self.weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.dtype = dtype

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, hidden_size]"""
        return self._ops.look_up(input_ids, self.weight, self.dtype)

    def read_from(self, rows: torch.Tensor) -> None:
        """Give the own matrix up and look tokens up in this one: the same numbers, in any float dtype."""
        assert rows.shape == self.weight.shape
        self.weight = rows

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}.weight": self.weight}


class LMHead:
    """Hidden states -> logits of the vocabulary, or of classes. ``tied_to``: an embedding that shares its matrix with
    this head. ``name``: that of its weight in the checkpoint."""

    product: LogitsProduct | None = None
    """Computes the logits, if it is set, from a plain weight."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: Embedding | None,
        name: str = "lm_head",
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.is_tied = tied_to is not None
        self.linear = Linear(
            hidden_size,
            {name: vocab_size},
            bias=False,
            dtype=dtype,
            device=device,
            shared=tied_to.weight if tied_to is not None else None,
        )

    def __call__(self, hidden: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """[rows, hidden_size], to be normed -> float32 [rows, vocab_size], contiguous: sampling reads whole rows."""
        if self.product is None:
            return self.linear(norm(hidden)).to(torch.float32)
        assert self.linear.weight is not None, "the weight was repacked for another product"
        return self.product(norm.in_float32(hidden), self.linear.weight)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        return {} if self.is_tied else self.linear.checkpoint_views("")
