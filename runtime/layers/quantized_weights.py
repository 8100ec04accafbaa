"""Weights of matrix products in few bits: the plain form, which files are read into and kernels pack.

    weight[o, i] = rows[o] × (scales[o, g] × number(code[o, i]) − mins[o, g])      g = i // group

``number`` is the code less an offset, or a value of the table of MXFP4. Every format that Baton reads has this form,
with one of few `QuantForm`s: what differs from file to file is the order of the bits. Inputs are never padded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of 4 bits in the OCP microscaling format: sign, two bits of exponent, one of mantissa."""


@dataclass(frozen=True, slots=True)
class QuantForm:
    """How the numbers of a weight are kept."""

    bits: Literal[4, 8]
    group: int = 0
    """Inputs that share a scale: 16, 32, 64, 128 or a multiple; 0: all inputs of an output."""
    has_mins: bool = False
    """True if something is subtracted from each group; then codes count from 0. Else they count from the middle, 128 or
    8. Needs groups."""
    codebook: Literal["integers", "mxfp4"] = "integers"

    @property
    def offset(self) -> int:
        """The code that stands for 0."""
        return 0 if self.has_mins or self.codebook == "mxfp4" else 1 << (self.bits - 1)

    @property
    def table_dtype(self) -> torch.dtype:
        """Of scales and mins: narrow where there are many. Files with such small groups have no finer ones."""
        return torch.float16 if self.group < 64 else torch.float32

    def __str__(self) -> str:
        kind = "mxfp4" if self.codebook == "mxfp4" else f"int{self.bits}"
        grouped = f", groups of {self.group}" if self.group else ""
        return kind + grouped + (" with minima" if self.has_mins else "")


WeightForm = QuantForm | torch.dtype
"""In few bits, or as narrow floats."""

FLOAT8 = torch.float8_e4m3fn
INT8 = QuantForm(8, 32)
INT4 = QuantForm(4, 32, has_mins=True)
"""What float weights become. One scale for all inputs of an output would do for 8 bits in large models; small ones lose
a fifth of a percent of perplexity by it. With a minimum, 4 bits lose a small part of what they lose without."""


QUANTIZATIONS: dict[str, WeightForm | None] = {"auto": None, "int8": INT8, "int4": INT4, "fp8": FLOAT8}
"""`--quantization` -> the form of the layers' weights; None: as the checkpoint has them."""


@dataclass(slots=True)
class QuantizedWeight:
    """A weight [out, in]; see the head of the file."""

    form: QuantForm
    codes: torch.Tensor
    """uint8 [out, in], or of 4 bits [out, in / 2]: the earlier of two inputs in the lower half of a byte."""
    rows: torch.Tensor
    """float32 [out]"""
    scales: torch.Tensor | None
    """form.table_dtype [out, in / group, rounded up]; None without groups."""
    mins: torch.Tensor | None
    """Like scales; None if the form has none."""

    @classmethod
    def empty(cls, out: int, into: int, form: QuantForm) -> QuantizedWeight:
        """A weight with room for codes and tables; rows are 1."""
        groups = -(-into // form.group) if form.group else 0
        tables = [torch.empty(out, groups, dtype=form.table_dtype) if groups else None for _ in range(2)]
        codes = torch.empty(out, into * form.bits // 8, dtype=torch.uint8)
        return cls(form, codes, torch.ones(out), tables[0], tables[1] if form.has_mins else None)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        out, packed = self.codes.shape
        return out, packed * 8 // self.form.bits

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.codes, self.rows, self.scales, self.mins) if each is not None)

    def outputs(self, which: slice | torch.Tensor) -> QuantizedWeight:
        """The weight of some outputs, by a slice (shared memory) or their numbers (a copy)."""
        scales, mins = (None if each is None else each[which] for each in (self.scales, self.mins))
        return replace(self, codes=self.codes[which], rows=self.rows[which], scales=scales, mins=mins)

    def unpacked_codes(self) -> torch.Tensor:
        """uint8 [out, in]"""
        if self.form.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), dim=2).flatten(1)

    def dequantized(self) -> torch.Tensor:
        """float32 [out, in]: the numbers that this weight stands for. The oracle of all kernels."""
        codes = self.unpacked_codes()
        if self.form.codebook == "mxfp4":
            numbers = torch.tensor(MXFP4_VALUES)[codes.long()]
        else:
            numbers = codes.float() - self.form.offset
        if self.scales is not None:
            numbers *= _spread(self.scales, self.form.group, numbers.shape[1])
        if self.mins is not None:
            numbers -= _spread(self.mins, self.form.group, numbers.shape[1])
        return numbers * self.rows[:, None]


@dataclass(slots=True)
class Float8Weight:
    """A weight [out, in] of 8-bit floats: weight[o, i] = scales[o, i // group] × codes[o, i]."""

    codes: torch.Tensor
    """float8_e4m3fn [out, in]"""
    scales: torch.Tensor
    """float32 [out, in / group, rounded up]"""
    group: int
    """Inputs that share a scale; 0: all."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        out, into = self.codes.shape
        return out, into

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def outputs(self, which: slice | torch.Tensor) -> Float8Weight:
        """See QuantizedWeight.outputs."""
        codes = self.codes.view(torch.uint8)[which].view(torch.float8_e4m3fn)
        return replace(self, codes=codes, scales=self.scales[which])

    def dequantized(self) -> torch.Tensor:
        """float32 [out, in]"""
        return self.codes.float() * _spread(self.scales, self.group or self.codes.shape[1], self.codes.shape[1])

    @classmethod
    def concatenated(cls, weights: Sequence[Float8Weight]) -> Float8Weight:
        """The outputs of several weights with equal groups, one behind the other."""
        codes = torch.cat([each.codes.view(torch.uint8) for each in weights]).view(weights[0].codes.dtype)
        return cls(codes, torch.cat([each.scales for each in weights]), weights[0].group)


PackedWeight = QuantizedWeight | Float8Weight


@dataclass(slots=True)
class ExpertsWeight:
    """The weights of all experts of a layer, which a checkpoint holds together."""

    experts: list[QuantizedWeight]
    """[out, in] each"""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, in, out)"""
        out, into = self.experts[0].shape
        return len(self.experts), into, out

    def dequantized(self) -> torch.Tensor:
        """float32 [experts, in, out]"""
        return torch.stack([expert.dequantized().t() for expert in self.experts])


def _spread(table: torch.Tensor, group: int, into: int) -> torch.Tensor:
    """[out, groups] -> float32 [out, in]"""
    return table.float().repeat_interleave(group, dim=1)[:, :into]


def concatenated(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The outputs of several weights of one form, one behind the other."""
    if len(weights) == 1:
        return weights[0]

    def together(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
        present = [each for each in tensors if each is not None]
        return torch.cat(present) if present else None

    return QuantizedWeight(
        weights[0].form,
        torch.cat([each.codes for each in weights]),
        torch.cat([each.rows for each in weights]),
        together([each.scales for each in weights]),
        together([each.mins for each in weights]),
    )
