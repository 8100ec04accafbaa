"""The matrix product of a linear layer, y = x Wᵀ + b, in the forms that torch offers.

    torch        F.linear, the only one on a GPU (MKL on a CPU in float32)
    transposed   mm(W, xᵀ), copied back to rows: MKL streams the weight for batches of 8 to 48 rows
    onednn       the weight repacked into the blocks that oneDNN's kernels read

Which is fastest depends on the processor, the shape, the dtype and the rows; `product_trials` finds out. All give the
numbers of F.linear up to rounding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

ROW_COUNTS = (1, 8, 32, 512)
"""What serving sees: one sequence, a few, a full batch, a prompt."""

_MOST_ROWS = (7, 16, 48)
"""Up to so many rows the choice for the first, second, third of ROW_COUNTS holds."""

TRANSPOSED_ROWS = ROW_COUNTS[1:3]
"""For one row both read the weight once, for a prompt the copy costs more than is won: only these are worth a trial."""

BATCH_HINT = 32
"""Rows for which oneDNN lays the blocks of a weight out."""


class Product(Protocol):
    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """x [rows, in] -> [rows, out], contiguous, in x's dtype."""
        ...


def torch_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return multiply


def transposed_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Copied back to rows, because later operations (above all attention) are slow on transposed memory."""
    column = bias.unsqueeze(1) if bias is not None else None

    def multiply(x: torch.Tensor) -> torch.Tensor:
        y = torch.mm(weight, x.t()) if column is None else torch.addmm(column, weight, x.t())
        return y.t().contiguous()

    return multiply


def onednn_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Takes as much memory as the weight, which it does not keep."""
    linear = torch.ops.mkldnn._linear_pointwise
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight, BATCH_HINT)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return linear(x, blocks, bias, "none", [], "")

    return multiply


TORCH, TRANSPOSED, ONEDNN = "torch", "transposed", "onednn"
FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor | None], Product]] = {
    TORCH: torch_product,
    TRANSPOSED: transposed_product,
    ONEDNN: onednn_product,
}
"""By name; each makes a product of weight [out, in] and bias [out]."""


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """A form for each of ROW_COUNTS. oneDNN is chosen for all or none: it would need a second copy of the weight."""

    forms: tuple[str, ...]

    @classmethod
    def of(cls, form: str) -> ProductChoice:
        return cls((form,) * len(ROW_COUNTS))

    @property
    def keeps_weight(self) -> bool:
        """False if the product has a copy of the weight, so that the weight can go."""
        return ONEDNN not in self.forms

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """The product of weight [out, in] and bias [out], which must not change any more."""
        made = {form: FORMS[form](weight, bias) for form in dict.fromkeys(self.forms)}
        if len(made) == 1:
            return made[self.forms[0]]
        by_rows = [made[form] for form in self.forms]

        def multiply(x: torch.Tensor) -> torch.Tensor:
            return by_rows[bisect_left(_MOST_ROWS, len(x))](x)

        return multiply

    def __str__(self) -> str:
        if len(set(self.forms)) == 1:
            return self.forms[0]
        return "/".join(self.forms)


PLAIN = ProductChoice.of(TORCH)
