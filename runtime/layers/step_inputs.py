"""The integers that the layers read for every new token of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class StepInputs:
    """Per-token inputs of the layers; device int64 [tokens] each."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    """The token's position in its sequence."""
    out_cache_loc: torch.Tensor
    """The slot for its K and V."""

    @classmethod
    def zeros(cls, tokens: int, device: torch.device) -> StepInputs:
        """Padding: token 0 at position 0, written to the padding slot."""
        return cls(*(torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(3)))

    def copy_(self, other: StepInputs) -> None:
        """Copy the values of ``other``, in place."""
        self.input_ids.copy_(other.input_ids)
        self.positions.copy_(other.positions)
        self.out_cache_loc.copy_(other.out_cache_loc)
