"""The recurrent states of sequences, per layer, indexed by slot.

    layers[i][name]: [num_states + 2, *shape]

    slot   0        1 … num_states         num_states + 1
           zeros    handed out             trash

Hybrid models (gated delta net, Mamba, short convolutions) keep, in some layers, a state of fixed size instead of the K
and V of every token. One slot holds all states of one sequence after some number of its tokens: of every such layer
the recurrent state and the last inputs of its convolution. Rows that begin read slot 0, which is never written; padding
writes to the trash slot. Which slot belongs to which sequence is the business of `StateSlots`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .kv_pool import untouched_zeros


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of one sequence's state in one layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


StateShape = Mapping[str, StateTensor]
"""What one layer keeps of a sequence, by name: "conv" (the last inputs of a convolution, [inputs, channels]) and
"recurrent". Code that is not Baton's may have others."""


def state_bytes(shapes: Sequence[StateShape]) -> int:
    """Bytes of one sequence's states in all layers."""
    return sum(tensor.nbytes for shape in shapes for tensor in shape.values())


class StatePool:
    """States of one model by slot. Slots that were never written take no memory on a CPU."""

    def __init__(self, num_states: int, shapes: Sequence[StateShape], device: torch.device) -> None:
        """shapes: of each layer with states, in order. Raises MemoryError where a CPU cannot hold the pool,
        torch.OutOfMemoryError where a GPU cannot."""
        if num_states < 1:
            raise ValueError(f"num_states must be at least 1, not {num_states}")
        self.num_states = num_states
        self.bytes_per_state = state_bytes(shapes)
        self.device = device
        self.trash = num_states + 1
        self.num_layers = len(shapes)
        try:
            self.layers: list[dict[str, torch.Tensor]] = [
                {
                    name: untouched_zeros((num_states + 2, *tensor.shape), tensor.dtype, device)
                    for name, tensor in shape.items()
                }
                for shape in shapes
            ]
        except torch.OutOfMemoryError:  # on a GPU: the caller, which shares out its memory, knows what to change
            raise
        except (MemoryError, ValueError) as error:  # ValueError: more than there are addresses
            size = f"{num_states} states × {self.bytes_per_state} bytes in {self.nbytes / 2**30:.2f} GiB"
            raise MemoryError(f"cannot allocate {size} on {device}; lower --max-states") from error

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, the two that are not handed out included."""
        return (self.num_states + 2) * self.bytes_per_state

    def find_not_finite(self, slots: torch.Tensor) -> torch.Tensor:
        """bool [n]: which of these slots (int64 [n]) hold a NaN or an infinity in any layer."""
        bad = torch.zeros(len(slots), dtype=torch.bool, device=self.device)
        for layer in self.layers:
            for tensor in layer.values():
                if tensor.dtype.is_floating_point:
                    bad |= ~tensor.index_select(0, slots).flatten(1).isfinite().all(1)
        return bad
