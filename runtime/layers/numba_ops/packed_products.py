"""Products with packed weights, of integers (quant_products.py) and narrow floats (narrow_products.py), side by side.

    x ─▶ rounded, or widened, as each weight wants it ─▶ a call for each weight ─▶ its outputs, in their columns of y

All are calls of the team, so a step with such products can be recorded. A row's result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from ....attention import processor
from ....attention.numba_paged.team import Team
from ..quantize import narrowed
from ..quantized_weights import Float8Weight, PackedWeight, QuantForm, QuantizedWeight, WeightForm, concatenated
from .narrow_products import MANY, NarrowBlocks, NarrowPart, WidenRows, pack_float8, pack_floats
from .packed_blocks import NoKernelError
from .quant_layout import DOT, SPAN, WIDTH
from .quant_products import FEW, MOST, Blocks, Inputs, LookUpRows, QuantizeRows, QuantPart, pack


class PackedProducts:
    """See products.PackedKernel. All calls come from one thread."""

    def __init__(self, team: Team) -> None:
        self._team = team

    @classmethod
    def probed(cls, team: Team, forms: Sequence[WeightForm]) -> PackedProducts:
        """forms: of weights, some that are to be multiplied. Raises RuntimeError if their products are wrong on this
        processor, and whatever compiling raises."""
        made, generator = cls(team), torch.Generator().manual_seed(0)
        for form in forms:
            weight = torch.randn(WIDTH, 2 * SPAN, generator=generator)
            narrow = narrowed(weight, form)
            numbers = narrow.float() if isinstance(narrow, torch.Tensor) else narrow.dequantized()
            product = made.prepare(made.pack([narrow]), None, torch.float32)
            for rows in (MOST + FEW + 1, MANY + FEW):  # all tiles, and weights that are widened first
                x = torch.randn(rows, 2 * SPAN, generator=generator)
                expected = x @ numbers.t()
                if not torch.allclose(product(x), expected, atol=0.02 * float(expected.abs().max())):
                    raise RuntimeError(f"products with {form} are wrong on this processor ({DOT})")
        return made

    def pack(self, weights: Sequence[torch.Tensor | PackedWeight]) -> list[Blocks | NarrowBlocks]:
        """The weights of a layer's projections, neighbours of one form together. Raises NoKernelError, for floats if
        the processor multiplies them as they are."""
        packed: list[Blocks | NarrowBlocks] = []
        for _, group in groupby(weights, key=_form):
            same = list(group)
            few = [weight for weight in same if isinstance(weight, QuantizedWeight)]
            if few:
                packed.append(pack(concatenated(few)))
                continue
            if float8 := [weight for weight in same if isinstance(weight, Float8Weight)]:
                packed.append(pack_float8(Float8Weight.concatenated(float8)))
                continue
            floats = [weight for weight in same if isinstance(weight, torch.Tensor)]
            if processor.multiplies(floats[0].dtype):
                raise NoKernelError(f"{floats[0].dtype} needs no packing")
            packed.append(pack_floats(torch.cat(floats) if len(floats) > 1 else floats[0]))
        return packed

    def prepare(
        self, packed: Sequence[Blocks | NarrowBlocks], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> PackedProduct:
        """bias: [out] of all of them, or None. dtype: of inputs and outputs. Raises whatever compiling raises."""
        return PackedProduct(self._team, packed, bias, dtype)

    def look_up(self, packed: Sequence[Blocks | NarrowBlocks], dtype: torch.dtype) -> LookUpRows:
        """Rows of one packed weight in few bits, by number. Raises whatever compiling raises."""
        (blocks,) = packed
        assert isinstance(blocks, Blocks), "tokens of a float embedding are looked up in its matrix"
        return LookUpRows(self._team, blocks, dtype)


def _form(weight: torch.Tensor | PackedWeight) -> QuantForm | torch.dtype | int:
    """The form of a weight; neighbours of the same form are packed together. For fp8 it is the size of a group."""
    if isinstance(weight, Float8Weight):
        return weight.group
    return weight.dtype if isinstance(weight, torch.Tensor) else weight.form


class PackedProduct:
    """y = x Wᵀ + b for weights that stand side by side."""

    def __init__(
        self, team: Team, packed: Sequence[Blocks | NarrowBlocks], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        kind = str(dtype).removeprefix("torch.")
        self._team, self._step = team, dtype.itemsize
        self._preparations: dict[Inputs | None, Any] = {}
        """Prepare the inputs of a weight: round them, or (None) widen them."""
        self._parts: list[tuple[Inputs | None, QuantPart | NarrowPart, int]] = []
        """Each with the offset of its first output, in bytes."""
        column = padded = 0
        for blocks in packed:
            out = blocks.size[0]
            own = None if bias is None else bias[column : column + out]
            if isinstance(blocks, NarrowBlocks):
                part, inputs = NarrowPart(team, blocks, own, kind), None
            else:
                part = QuantPart(team, blocks, own, kind)
                inputs = part.inputs
            if inputs not in self._preparations:
                self._preparations[inputs] = (
                    WidenRows(team, kind) if inputs is None else QuantizeRows(team, kind, inputs)
                )
            self._parts.append((inputs, part, column * dtype.itemsize))
            padded, column = column + part.padded, column + out
        self._out, self._padded = column, padded

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out], contiguous, in x's dtype."""
        prepared = {inputs: prepare(x) for inputs, prepare in self._preparations.items()}
        found = self._team.empty((len(x), self._padded), x.dtype)
        # A weight's last block may have outputs that there are not: the next weight's first ones are written over them.
        for inputs, part, offset in self._parts:
            part.write(prepared[inputs], found.data_ptr() + offset, self._padded * self._step)
        return found if self._out == self._padded else found[:, : self._out].contiguous()
