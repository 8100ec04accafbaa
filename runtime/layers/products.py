"""The matrix product of a linear layer, y = x Wᵀ + b, in several forms.

    torch        F.linear, the only one on a GPU (MKL on a CPU in float32)
    transposed   mm(W, xᵀ), copied back to rows: MKL streams the weight for batches of 8 to 48 rows
    onednn       the weight repacked into the blocks that oneDNN's kernels read
    numba        the same blocks, read by a kernel of our own (numba_ops/blocks.py)
    widened      bfloat16 and float16 in float32, for processors without arithmetic of their own for them

The fastest form depends on the processor, the shape, the dtype and the rows; `product_trials` finds it. All give the
numbers of F.linear up to rounding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from ...attention import processor
from .quantized_weights import PackedWeight

ROW_COUNTS = (1, 8, 32, 512)
"""Row counts typical of serving: one sequence, a few, a full batch, a prompt."""

_MOST_ROWS = (7, 16, 48)
"""Most rows for which the choice of the first, second, third of ROW_COUNTS holds."""

TRANSPOSED_ROWS = ROW_COUNTS[1:3]
"""Row counts worth a trial: for one row both forms read the weight once, and for a prompt the copy costs too much."""

BATCH_HINT = 32
"""Rows for which oneDNN lays the blocks of a weight out."""


class Product(Protocol):
    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """x [rows, in] -> [rows, out], contiguous, in x's dtype."""
        ...


class GroupedProduct(Protocol):
    def __call__(self, x: torch.Tensor, groups: np.ndarray, counts: np.ndarray, /) -> torch.Tensor:
        """x [rows, in], the rows of each group side by side; groups, counts: int64 [n], the weight of each group, and
        its number of rows, at least one -> [rows, out], contiguous."""
        ...


class BlockKernel(Protocol):
    """Makes products of weights in oneDNN's blocks: numba_ops.blocks.BlockProducts."""

    def prepare(self, blocks: torch.Tensor, size: tuple[int, int], bias: torch.Tensor | None, /) -> Product:
        """blocks: a weight [out, in], as `reorder` packs it; size: (out, in). Raises ValueError if it has no
        kernel for this size."""
        ...

    def prepare_group(
        self, blocks: Sequence[torch.Tensor], size: tuple[int, int], biases: Sequence[torch.Tensor | None], /
    ) -> GroupedProduct:
        """The same for several weights of one size."""
        ...


class PackedBlocks(Protocol):
    """Weights in few bits, or in 16, as a kernel reads them."""

    @property
    def nbytes(self) -> int: ...


class LookUp(Protocol):
    def __call__(self, ids: torch.Tensor, /) -> torch.Tensor:
        """int64 [n], contiguous -> the rows of these numbers, [n, in]"""
        ...


class PackedKernel(Protocol):
    """Makes products of weights in few bits, and of narrow floats that the processor does not multiply:
    numba_ops.packed_products.PackedProducts."""

    def pack(self, weights: Sequence[torch.Tensor | PackedWeight], /) -> Sequence[PackedBlocks]:
        """weights: [out, in], of one input; tensors are 16-bit floats. Raises ValueError where there is no kernel for
        one of them."""
        ...

    def prepare(self, packed: Sequence[Any], bias: torch.Tensor | None, dtype: torch.dtype, /) -> Product:
        """packed: by `pack`. bias: [out of all], or None. The outputs stand side by side, in the dtype."""
        ...

    def look_up(self, packed: Sequence[Any], dtype: torch.dtype, /) -> LookUp:
        """packed: a single weight, by `pack`."""
        ...


def reorder(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> the same in blocks, as oneDNN packs it. Raises processor.CannotPackError where it packs none of this
    dtype."""
    if not processor.packs(weight.dtype):
        kind = str(weight.dtype).removeprefix("torch.")
        raise processor.CannotPackError(f"oneDNN packs no {kind} on this processor")
    return torch.ops.mkldnn._reorder_linear_weight(weight, BATCH_HINT)


@dataclass
class Source:
    """Operands of a product: weight [out, in] and bias [out], which must not change any more."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    kernel: BlockKernel | None = None
    """Makes the form "numba"; None if that does not exist here."""

    @cached_property
    def blocks(self) -> torch.Tensor:
        """The weight as oneDNN packs it. Takes as much memory."""
        return reorder(self.weight)


def torch_product(source: Source) -> Product:
    weight, bias = source.weight, source.bias

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return multiply


def transposed_product(source: Source) -> Product:
    """Copied back to rows, because later operations (above all attention) are slow on transposed memory."""
    weight = source.weight
    column = source.bias.unsqueeze(1) if source.bias is not None else None

    def multiply(x: torch.Tensor) -> torch.Tensor:
        y = torch.mm(weight, x.t()) if column is None else torch.addmm(column, weight, x.t())
        return y.t().contiguous()

    return multiply


def onednn_product(source: Source) -> Product:
    """Does not keep the weight."""
    linear, blocks, bias = torch.ops.mkldnn._linear_pointwise, source.blocks, source.bias

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return linear(x, blocks, bias, "none", [], "")

    return multiply


WIDENED_BYTES = 4 << 20
"""Bytes of a weight widened at a time, few enough to stay in a cache until they are multiplied."""


def widened_product(source: Source) -> Product:
    """Sums in float32, and rounds once. The weight stays as narrow as it is: a part at a time becomes float32, so that
    it is read from memory in half the time. torch's own loop for a single row widens as it reads."""
    weight, bias = source.weight, source.bias
    if weight.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{weight.dtype} is not widened")
    outs, into = weight.shape
    step = max(1, WIDENED_BYTES // (4 * into))
    wide_bias = None if bias is None else bias.float()

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return F.linear(x, weight, bias)
        wide_x, out = x.float(), torch.empty(len(x), outs)
        for begin in range(0, outs, step):
            part = slice(begin, begin + step)
            torch.mm(wide_x, weight[part].float().t(), out=out[:, part])
        return (out if wide_bias is None else out.add_(wide_bias)).to(x.dtype)

    return multiply


def numba_product(source: Source) -> Product:
    """Does not keep the weight. Raises ValueError where there is no kernel for it."""
    if source.kernel is None:
        raise ValueError("Numba's kernels are not in use")
    out, into = source.weight.shape
    return source.kernel.prepare(source.blocks, (out, into), source.bias)


TORCH, TRANSPOSED, ONEDNN, NUMBA, WIDENED = "torch", "transposed", "onednn", "numba", "widened"
FORMS: dict[str, Callable[[Source], Product]] = {
    TORCH: torch_product,
    TRANSPOSED: transposed_product,
    ONEDNN: onednn_product,
    NUMBA: numba_product,
    WIDENED: widened_product,
}
PACKED = (ONEDNN, NUMBA)
"""Forms that read a weight's blocks, and not the weight."""


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """A form for each of ROW_COUNTS. Packed ones are chosen for all or none: the others need a second copy of the
    weight."""

    forms: tuple[str, ...]

    @classmethod
    def of(cls, form: str) -> ProductChoice:
        return cls((form,) * len(ROW_COUNTS))

    @property
    def keeps_weight(self) -> bool:
        """False if the product has a copy of the weight, so that the weight can go."""
        return not set(self.forms) & set(PACKED)

    def prepare(self, source: Source) -> Product:
        made = {form: FORMS[form](source) for form in dict.fromkeys(self.forms)}
        if len(made) == 1:
            return made[self.forms[0]]
        by_rows = [made[form] for form in self.forms]

        def multiply(x: torch.Tensor) -> torch.Tensor:
            return by_rows[bisect_left(_MOST_ROWS, len(x))](x)

        return multiply

    def form(self, rows: int) -> str:
        """The product for this many rows."""
        return self.forms[bisect_left(_MOST_ROWS, rows)]

    def __str__(self) -> str:
        if len(set(self.forms)) == 1:
            return self.forms[0]
        return "/".join(self.forms)


PLAIN = ProductChoice.of(TORCH)
