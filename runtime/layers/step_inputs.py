"""Per-token inputs of the layers, and the pending KV loads they must wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ...attention.backend import AttentionSpec
from .states.state_batch import StateBatch


class Arrivals(Protocol):
    """KV and recurrent states on their way to the device's pools: the states first, then the KV layer by layer."""

    def wait_layer(self, layer: int) -> None:
        """Return once this layer's K and V may be read. Raises if they will not come."""
        ...

    def wait_states(self) -> None:
        """Return once all recurrent states may be read. Raises if they will not come."""
        ...


@dataclass(slots=True)
class StepInputs:
    """Inputs of the layers; device int64 [tokens] each."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    """The token's position in its sequence."""
    out_cache_loc: torch.Tensor
    """The slot for its K and V."""
    arrivals: Arrivals | None = None
    """Wait called by each layer before it touches the pool; None for no wait. Graphs cannot wait."""
    states: StateBatch | None = None
    """Where layers with recurrent states find them; None for models without."""
    out_window_loc: torch.Tensor | None = None
    """The slot for its K and V in layers with a sliding window; None where these have no pool of their own."""

    @classmethod
    def zeros(cls, tokens: int, device: torch.device, *, windows: bool = False) -> StepInputs:
        """Padding: token 0 at position 0, written to the padding slot. windows: of that pool, too."""
        ids, positions, slots = (torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(3))
        return cls(ids, positions, slots, out_window_loc=torch.zeros_like(slots) if windows else None)

    def slots_for(self, spec: AttentionSpec) -> torch.Tensor:
        """The slots in the pool of this layer."""
        return self.out_cache_loc if self.out_window_loc is None or spec.reach.most is None else self.out_window_loc

    def copy_(self, other: StepInputs) -> None:
        """Copy the values of ``other``, in place. It waits for nothing. Recorded kernels find its states where they
        found those of this object, in the table."""
        assert other.arrivals is None, "a graph cannot wait for layers"
        self.input_ids.copy_(other.input_ids)
        self.positions.copy_(other.positions)
        self.out_cache_loc.copy_(other.out_cache_loc)
        if self.states is not None and other.states is not None:
            self.states.table.point_at(other.states.rows)
        if self.out_window_loc is not None:
            assert other.out_window_loc is not None, "a step of a model with windows must say where they are"
            self.out_window_loc.copy_(other.out_window_loc)
