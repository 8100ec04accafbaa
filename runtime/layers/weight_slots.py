"""Places for weights that are not widened when they are loaded."""

from __future__ import annotations

import torch

from .quantize import narrowed
from .quantized_weights import PackedWeight, WeightForm


class WeightSlot:
    """Takes one weight as the checkpoint has it, or in few bits. See checkpoint.weights.WeightSlot."""

    def __init__(self, out: int, into: int, form: WeightForm | None) -> None:
        """form: what a float weight becomes; None: it stays one."""
        self.shape = out, into
        self.form = form
        self._weight: torch.Tensor | PackedWeight | None = None

    def store(self, weight: torch.Tensor | PackedWeight) -> None:
        """weight: [out, in]; a tensor is copied."""
        assert tuple(weight.shape) == self.shape, f"{tuple(weight.shape)} is not {self.shape}"
        if not isinstance(weight, torch.Tensor):
            self._weight = weight
        else:
            self._weight = weight.clone() if self.form is None else narrowed(weight, self.form)

    @property
    def weight(self) -> torch.Tensor | PackedWeight:
        """What has been stored."""
        assert self._weight is not None, "no weight has been loaded"
        return self._weight

    @property
    def nbytes(self) -> int:
        return 0 if self._weight is None else self._weight.nbytes


class UnreadSlot(WeightSlot):
    """Leaves a weight in its file, where it is looked up."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__(out, into, None)

    def store(self, weight: torch.Tensor | PackedWeight) -> None:
        pass


def in_dtype(weight: torch.Tensor | PackedWeight, dtype: torch.dtype) -> torch.Tensor | PackedWeight:
    """Floats that are rounded to a model's dtype of 16 bits; in float32 they stay as narrow as they are."""
    return weight.to(dtype) if isinstance(weight, torch.Tensor) and dtype != torch.float32 else weight


def widened(weight: torch.Tensor | PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """[out, in], as floats."""
    return weight.to(dtype) if isinstance(weight, torch.Tensor) else weight.dequantized().to(dtype)


def pick_outputs(weights: list[torch.Tensor | PackedWeight], order: torch.Tensor) -> list[torch.Tensor | PackedWeight]:
    """Weights of one input, side by side, with their outputs in another order: runs of outputs of one weight each.
    order: int64, for each output its number in what there is now."""
    starts = torch.tensor([0, *(weight.shape[0] for weight in weights)]).cumsum(0)
    owners = torch.searchsorted(starts, order, right=True) - 1
    found, begin = [], 0
    for length in torch.unique_consecutive(owners, return_counts=True)[1].tolist():
        owner = int(owners[begin])
        own, weight = order[begin : begin + length] - starts[owner], weights[owner]
        found.append(weight[own] if isinstance(weight, torch.Tensor) else weight.outputs(own))
        begin += length
    return found
