"""Turns the blocks of a GGUF tensor into a weight in few bits. Only the order of the bits changes.

A block holds 32 inputs of one output (K-quants: 256, in groups of 16 or 32), their scale, and minimum if there is one.
K-quants store the scale of a group as a small integer times the block's scale; that product is rounded to float16, as
the tables of small groups are kept. Everything else is exact.

The layouts are those of ggml's documentation; in 32-blocks of 4 bits, the low halves of 16 bytes are the first 16
inputs and the high halves the other 16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..layers.quantized_weights import QuantForm, QuantizedWeight
from .unpacking import fit_tables, pack_nibbles

_Blocks = torch.Tensor
"""uint8 [blocks, bytes of one]"""
_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Of some blocks: codes uint8 [blocks, inputs], scales and minima float32 [blocks, groups]."""


def unpack_blocks(kind: str, data: torch.Tensor, out: int) -> QuantizedWeight:
    """kind: one of `QUANTISED`. data: uint8, the blocks of all outputs, one output after the other."""
    form, read = QUANTISED[kind]
    codes, scales, mins = read(data)
    rows, tables, minima = fit_tables(form, scales.view(out, -1), None if mins is None else mins.view(out, -1))
    codes = codes.view(out, -1)
    return QuantizedWeight(form, pack_nibbles(codes) if form.bits == 4 else codes, rows, tables, minima)


def _half(blocks: _Blocks, start: int) -> torch.Tensor:
    """A float16 in each block -> float32 [blocks, 1]"""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, n] -> [blocks, 2 n]: the low halves of all bytes, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 4], a bit for each of 32 inputs -> uint8 [blocks, 32], 16 where it is set."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[:, :, None] >> shifts) & 1).flatten(1) << 4


def _q4_0(blocks: _Blocks) -> _Parts:
    return _halves(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: _Blocks) -> _Parts:
    return _halves(blocks[:, 4:]), _half(blocks, 0), -_half(blocks, 2)


def _q5_0(blocks: _Blocks) -> _Parts:
    codes = _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return codes + (128 - 16), _half(blocks, 0), None


def _q5_1(blocks: _Blocks) -> _Parts:
    codes = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes, _half(blocks, 0), -_half(blocks, 2)


def _q8_0(blocks: _Blocks) -> _Parts:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None  # two's complement, to codes that count from 0


def _q4_k(blocks: _Blocks) -> _Parts:
    codes = torch.stack((blocks[:, 16:].view(-1, 4, 32) & 15, blocks[:, 16:].view(-1, 4, 32) >> 4), dim=2)
    return (codes.flatten(1), *_six_bit_tables(blocks))


def _q5_k(blocks: _Blocks) -> _Parts:
    low = blocks[:, 48:].view(-1, 4, 32)
    codes = torch.stack((low & 15, low >> 4), dim=2).view(-1, 8, 32)
    fifth = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1  # a bit for each group
    return ((codes | (fifth << 4)).flatten(1), *_six_bit_tables(blocks))


def _six_bit_tables(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the 8 groups of Q4_K and Q5_K, 6 bits each: those of the first four groups by themselves,
    the others' low 4 bits in bytes of their own and their high 2 bits above the first four's."""
    packed = blocks[:, 4:16].view(-1, 3, 4)
    first, second, low = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = torch.cat((first & 63, (low & 15) | ((first >> 6) << 4)), dim=1)
    mins = torch.cat((second & 63, (low >> 4) | ((second >> 6) << 4)), dim=1)
    return scales * _half(blocks, 0), mins * _half(blocks, 2)


def _q6_k(blocks: _Blocks) -> _Parts:
    low, high = blocks[:, :128].view(-1, 2, 2, 32), blocks[:, 128:192].view(-1, 2, 1, 32)
    low = torch.cat((low & 15, low >> 4), dim=2)  # [blocks, half, 4 groups of 32, 32]
    high = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]) & 3
    codes = (low | (high << 4)).flatten(1)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return codes + (128 - 32), scales * _half(blocks, 208), None


def _mxfp4(blocks: _Blocks) -> _Parts:
    return _halves(blocks[:, 1:]), torch.exp2(blocks[:, :1].float() - 127), None


QUANTISED: dict[str, tuple[QuantForm, Callable[[_Blocks], _Parts]]] = {
    "Q4_0": (QuantForm(4, 32), _q4_0),
    "Q4_1": (QuantForm(4, 32, has_mins=True), _q4_1),
    "Q5_0": (QuantForm(8, 32), _q5_0),
    "Q5_1": (QuantForm(8, 32, has_mins=True), _q5_1),
    "Q8_0": (QuantForm(8, 32), _q8_0),
    "Q4_K": (QuantForm(4, 32, has_mins=True), _q4_k),
    "Q5_K": (QuantForm(8, 32, has_mins=True), _q5_k),
    "Q6_K": (QuantForm(8, 16), _q6_k),
    "MXFP4": (QuantForm(4, 32, codebook="mxfp4"), _mxfp4),
}
"""Name of a block type -> its form, and what reads it."""
