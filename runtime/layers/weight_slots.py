"""Places for weights that are not widened when they are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .quantize import narrowed
from .quantized_weights import ExpertsWeight, PackedWeight, WeightForm


class WeightSlot:
    """Takes one weight as the checkpoint has it, or in few bits. See checkpoint.weights.WeightSlot."""

    def __init__(self, out: int, into: int, form: WeightForm | None) -> None:
        """form: what a float weight becomes; None: it stays one."""
        self.shape = out, into
        self.form = form
        self._weight: torch.Tensor | PackedWeight | None = None

    def store(self, weight: torch.Tensor | PackedWeight | ExpertsWeight) -> None:
        """weight: [out, in]; a tensor is copied."""
        assert tuple(weight.shape) == self.shape, f"{tuple(weight.shape)} is not {self.shape}"
        assert not isinstance(weight, ExpertsWeight)
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


class ExpertsSlot:
    """Takes the weights of all experts, which a checkpoint holds as one tensor: see checkpoint.weights.WeightSlot."""

    def __init__(self, experts: Sequence[Sequence[WeightSlot]], *, is_transposed: bool) -> None:
        """experts: of each the slots whose outputs stand side by side. is_transposed: the tensor is [experts, in, out],
        else [experts, out, in]."""
        self._experts, self._is_transposed = experts, is_transposed
        out, into = sum(slot.shape[0] for slot in experts[0]), experts[0][0].shape[1]
        self.shape = (len(experts), into, out) if is_transposed else (len(experts), out, into)

    def store(self, weight: torch.Tensor | PackedWeight | ExpertsWeight) -> None:
        """weight: of this shape."""
        assert tuple(weight.shape) == self.shape and isinstance(weight, torch.Tensor | ExpertsWeight), weight.shape
        for number, slots in enumerate(self._experts):
            if isinstance(weight, ExpertsWeight):
                whole: torch.Tensor | PackedWeight = weight.experts[number]
            else:
                whole = weight[number].t().contiguous() if self._is_transposed else weight[number]
            start = 0
            for slot in slots:
                own = slice(start, start + slot.shape[0])
                slot.store(whole[own] if isinstance(whole, torch.Tensor) else whole.outputs(own))
                start = own.stop

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slots in self._experts for slot in slots)


class UnreadSlot(WeightSlot):
    """Leaves a weight in its file, where it is looked up."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__(out, into, None)

    def store(self, weight: torch.Tensor | PackedWeight | ExpertsWeight) -> None:
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
