"""Turns the packed tensors of GPTQ, AWQ, compressed-tensors and fp8 checkpoints into weights in few bits.

Only the order of the bits changes: the numbers stay those of the file. Where a file has a zero point for each group,
``scale × (code − zero)`` becomes ``scale × code − min`` with ``min = scale × zero``: exact in float32, as the tables of
groups of 64 inputs and more are kept, and rounded once to float16 in smaller groups.

Codes lie in words of 32 bits, the first in the lowest bits. Words are little-endian, as in all safetensors files, so
that their bytes are codes of 8 bits in order, or pairs of 4 bits with the earlier one in the lower half.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..layers.quantized_weights import ExpertsWeight, Float8Weight, PackedWeight, QuantForm, QuantizedWeight
from .model_files import ModelLoadError
from .packed_safetensors import PackedTensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight outputs, the place of its 4 bits in the word."""


def unpack_weight(stored: PackedTensor, parts: Mapping[str, torch.Tensor]) -> PackedWeight:
    """parts: the tensors that ``stored.parts`` names, whose shapes and types have been checked. Raises ModelLoadError
    for groups in an order of their own, and for numbers that are not finite."""
    packing = stored.settings.packing
    try:
        if packing == "float8":
            return _float8(stored, parts)
        if packing == "plain":
            return _plain(stored, parts)
        if packing == "gptq":
            return _gptq(stored, parts)
        return _awq(stored, parts) if packing == "awq" else _compressed(stored, parts)
    except ValueError as error:
        raise ModelLoadError(f"{stored.file}: the weight of {stored.name.rpartition('.')[0]} {error}") from error


def unpack_experts(blocks: torch.Tensor, scales: torch.Tensor) -> ExpertsWeight:
    """The weights of all experts of a layer of gpt-oss.

    blocks: uint8 [experts, out, in / 32, 16], the earlier of two inputs in the lower half of a byte. scales: uint8
    [experts, out, in / 32], exponents of 2 plus 127."""
    form, experts = QuantForm(4, 32, codebook="mxfp4"), []
    for codes, exponents in zip(blocks, scales, strict=True):
        rows, tables, _ = fit_tables(form, torch.exp2(exponents.float() - 127), None)
        experts.append(QuantizedWeight(form, codes.flatten(1), rows, tables, None))
    return ExpertsWeight(experts)


def make_weight(
    bits: int, group: int, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> QuantizedWeight:
    """A weight of integers: scales × (code − zeros).

    codes: as in `QuantizedWeight`, counted from 0. group: 0 for one scale per output, which 4 bits and zero points get
    as equal scales of small groups, as the form of such weights needs groups. scales: float32 [out, groups],
    zeros: likewise, or None for the middle code."""
    into = codes.shape[1] * 8 // bits
    group = group if group < into else 0
    if zeros is not None and bool((zeros == 1 << (bits - 1)).all()):
        zeros = None
    if not group and zeros is None and bits == 8:
        return QuantizedWeight(QuantForm(8), codes, scales[:, 0].clone(), None, None)
    if not group:
        group = next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if into % size == 0)
        scales = scales.expand(-1, into // group)
        zeros = None if zeros is None else zeros.expand(-1, into // group)
    form = QuantForm(4 if bits == 4 else 8, group, zeros is not None)
    mins = None if zeros is None else scales * zeros
    rows, scales, mins = fit_tables(form, scales, mins)
    return QuantizedWeight(form, codes, rows, scales, mins)


def fit_tables(
    form: QuantForm, scales: torch.Tensor, mins: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``rows`` [out], and tables [out, groups] in the form's type, for float32 tables.

    Rows are 1 if the type has all the numbers, and else a power of two, so that only digits are rounded and no number
    leaves the range of the type."""
    kind = form.table_dtype
    rows = torch.ones(len(scales))
    tables = [scales] if mins is None else [scales, mins]
    if not all(torch.equal(table.to(kind).float(), table) for table in tables):
        largest = torch.stack([table.abs().amax(dim=1) for table in tables]).amax(dim=0)
        rows = torch.exp2(torch.frexp(largest).exponent.sub(8).clamp(-126, 120).float())
        rows[largest == 0] = 1.0
        tables = [table / rows[:, None] for table in tables]
    fitted = [table.to(kind).contiguous() for table in tables]
    return rows, fitted[0], fitted[1] if mins is not None else None


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in], each below 16 -> [out, in / 2], the earlier of two inputs in the lower half of a byte."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _codes_in(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, words] -> uint8 [rows, codes], in order."""
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), dim=2).flatten(1)


def _gptq(stored: PackedTensor, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    settings, (_, into) = stored.settings, stored.shape
    if (order := parts.get("g_idx")) is not None:
        groups = torch.arange(into) // (settings.group or into)
        if order.shape != groups.shape or not torch.equal(order.to(groups.dtype), groups):
            raise ValueError(
                "assigns inputs to groups in an order of its own (g_idx, desc_act), which is not supported; take a "
                "release that was quantised with desc_act false"
            )
    codes = parts["qweight"].t().contiguous().view(torch.uint8)
    zeros = _codes_in(parts["qzeros"], settings.bits).t().float()
    return make_weight(
        settings.bits, settings.group, codes, parts["scales"].t().float(), zeros + int(settings.zeros_plus_one)
    )


def _awq(stored: PackedTensor, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    codes, zeros = (_in_awq_order(parts[name]) for name in ("qweight", "qzeros"))
    packed = pack_nibbles(codes.t().contiguous())
    return make_weight(4, stored.settings.group, packed, parts["scales"].t().float(), zeros.t().float())


def _in_awq_order(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, out / 8] -> uint8 [rows, out]"""
    codes = _codes_in(words, 4)
    return codes.view(len(codes), -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)


def _compressed(stored: PackedTensor, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    settings, out = stored.settings, stored.shape[0]
    middle = 1 << (settings.bits - 1)
    if settings.packing == "packed":
        if tuple(parts["weight_shape"].tolist()) != stored.shape:
            raise ValueError(f"has weight_shape {parts['weight_shape'].tolist()}, but {list(stored.shape)} codes")
        codes = parts["weight_packed"].contiguous().view(torch.uint8)
    else:
        codes = parts["weight"].contiguous().view(torch.uint8) ^ 128  # two's complement, to codes that count from 0
    scales = _table(parts["weight_scale"], out)
    zeros = parts.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = _codes_in(zeros.t(), settings.bits).t()[:out].float()
    elif zeros is not None:
        zeros = _table(zeros, out) + middle
    return make_weight(settings.bits, settings.group, codes, scales, zeros)


def _float8(stored: PackedTensor, parts: Mapping[str, torch.Tensor]) -> Float8Weight:
    out, _ = stored.shape
    codes = parts["weight"]
    scales = next(parts[name] for name in ("weight_scale", "weight_scale_inv") if name in parts)
    block = stored.settings.block
    if block is None:
        table = _table(scales, out).contiguous()
        return Float8Weight(codes, table, stored.settings.group if table.shape[1] > 1 else 0)
    table = scales.float().repeat_interleave(block[0], dim=0)[:out].contiguous()
    return Float8Weight(codes, table, block[1])


def _plain(stored: PackedTensor, parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    mins = parts.get("weight_mins")
    form = QuantForm(stored.settings.bits, stored.settings.group, has_mins=mins is not None)
    return QuantizedWeight(form, parts["weight_codes"], parts["weight_rows"], parts["weight_scales"], mins)


def _table(table: torch.Tensor, out: int) -> torch.Tensor:
    """A scale or zero point per tensor, output or group -> float32 [out, groups]"""
    found = table.float()
    if found.numel() == 1:
        return found.reshape(1, 1).expand(out, 1)
    return found.reshape(out, -1)
