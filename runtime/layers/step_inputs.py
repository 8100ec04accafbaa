"""The integers that the layers read for every new token of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class StepInputs:
    """Per-token inputs of the layers; device int64 [tokens] each."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    """Position within the token's sequence."""
    out_cache_loc: torch.Tensor
    """Slot that its K and V go to."""

    @classmethod
    def zeros(cls, tokens: int, device: torch.device) -> StepInputs:
        """Padding: token 0 at position 0, written to the padding slot."""
        return cls(*(torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(3)))

    def copy_(self, other: StepInputs) -> None:
        """Take over what ``other`` holds, in place."""
        self.input_ids.copy_(other.input_ids)
        self.positions.copy_(other.positions)
        self.out_cache_loc.copy_(other.out_cache_loc)
