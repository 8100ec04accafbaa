"""Writes checkpoints in the formats of GPTQ, AWQ, compressed-tensors and fp8, from plain ones.

Everything here follows the formats' own documentation, element by element, and shares nothing with the readers:
`written` returns the numbers that a file stands for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The output, of eight, that each 4 bits of a word belong to, from the lowest."""


@dataclass(frozen=True)
class Integers:
    """A weight [out, in] as scale × (code − zero)."""

    codes: torch.Tensor
    """int64 [out, in], from 0"""
    scales: torch.Tensor
    """[out, groups]"""
    zeros: torch.Tensor
    """int64 [out, groups]"""
    group: int

    def numbers(self) -> torch.Tensor:
        """float32 [out, in]"""
        spread = [table.repeat_interleave(self.group, dim=1) for table in (self.scales, self.zeros)]
        return ((self.codes - spread[1]).double() * spread[0].double()).float()


def quantise(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, kind: torch.dtype = torch.float16
) -> Integers:
    """group: -1 for one per output."""
    out, into = weight.shape
    group = into if group < 0 else group
    grouped = weight.float().view(out, -1, group)
    largest, top = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = (grouped.abs().amax(2) / (top - 0.5)).clamp_min(1e-4).to(kind)
        zeros = torch.full(scales.shape, top)
    else:
        low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
        scales = ((high - low) / largest).clamp_min(1e-4).to(kind)
        zeros = (-low / scales.float()).round().clamp(1, largest).long()
    codes = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, largest).long()
    return Integers(codes.view(out, into), scales, zeros, group)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 [rows, n] -> int32 [rows, n * bits / 32], the first code in the lowest bits."""
    each = 32 // bits
    words = torch.zeros(codes.shape[0], codes.shape[1] // each, dtype=torch.int64)
    for place in range(each):
        words |= codes[:, place::each] << (bits * place)
    return ((words + 2**31) % 2**32 - 2**31).to(torch.int32)


def _gptq(bits: int, group: int, symmetric: bool, version: int = 1) -> Format:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = quantise(weight, bits, group, symmetric=symmetric)
        stored = found.zeros - 1 if version == 1 else found.zeros
        return {
            f"{name}.qweight": pack_words(found.codes, bits).t().contiguous(),
            f"{name}.qzeros": pack_words(stored.t().contiguous(), bits),
            f"{name}.scales": found.scales.t().contiguous(),
            f"{name}.g_idx": (torch.arange(weight.shape[1]) // found.group).to(torch.int32),
        }, found.numbers()

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    return Format(config | ({"checkpoint_format": "gptq_v2"} if version == 2 else {}), write)


def _awq(group: int) -> Format:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = quantise(weight, 4, group, symmetric=False)

        def interleaved(codes: torch.Tensor) -> torch.Tensor:
            mixed = torch.empty_like(codes)
            for column in range(0, codes.shape[1], 8):
                for place, output in enumerate(_AWQ_ORDER):
                    mixed[:, column + place] = codes[:, column + output]
            return pack_words(mixed, 4)

        return {
            f"{name}.qweight": interleaved(found.codes.t().contiguous()),
            f"{name}.qzeros": interleaved(found.zeros.t().contiguous()),
            f"{name}.scales": found.scales.t().contiguous(),
        }, found.numbers()

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(config, write)


def _compressed(
    form: str, weights: dict[str, Any], write: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
) -> Format:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return Format(config, write)


def _packed(bits: int, group: int, symmetric: bool, *, packs_zeros: bool = True) -> Format:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = quantise(weight, bits, group, symmetric=symmetric, kind=torch.bfloat16)
        tensors = {
            f"{name}.weight_packed": pack_words(found.codes, bits),
            f"{name}.weight_scale": found.scales,
            f"{name}.weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric and packs_zeros:
            tensors[f"{name}.weight_zero_point"] = pack_words(found.zeros.t().contiguous(), bits).t().contiguous()
        elif not symmetric:
            tensors[f"{name}.weight_zero_point"] = (found.zeros - 2 ** (bits - 1)).to(torch.int8)
        return tensors, found.numbers()

    strategy = {"strategy": "channel"} if group < 0 else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    return _compressed("pack-quantized", weights, write)


def _int8(symmetric: bool) -> Format:
    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        found = quantise(weight, 8, -1, symmetric=symmetric, kind=torch.float32)
        tensors = {
            f"{name}.weight": (found.codes - 128).to(torch.int8),
            f"{name}.weight_scale": found.scales,
            f"{name}.input_scale": torch.ones(1),
        }
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = (found.zeros - 128).to(torch.int8)
        return tensors, found.numbers()

    return _compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, write)


def _float8(name: str, weight: torch.Tensor, block: tuple[int, int] | None, scale: str) -> tuple[Tensors, torch.Tensor]:
    """block: outputs and inputs; None for one scale of all."""
    out, into = weight.shape
    rows, columns = block or (out, into)
    scales = torch.empty(-(-out // rows), -(-into // columns))
    codes = torch.empty(out, into, dtype=torch.float8_e4m3fn)
    numbers = torch.empty(out, into)
    for i in range(len(scales)):
        for j in range(scales.shape[1]):
            part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[part].abs().max().clamp_min(1e-3) / 448
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[part] = codes[part].float() * scales[i, j]
    stored = scales.reshape(()) if block is None else scales
    return {f"{name}.weight": codes, f"{name}.{scale}": stored}, numbers


@dataclass(frozen=True)
class Format:
    """A format of weights."""

    config: dict[str, Any]
    """quantization_config"""
    write: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
    """(module, weight [out, in]) -> tensors of the file by name, and the float32 numbers that they stand for."""


_FLOAT8 = {"num_bits": 8, "type": "float"}

FORMATS: dict[str, Format] = {
    "gptq4": _gptq(4, 32, True),
    "gptq4-zeros": _gptq(4, 64, False),
    "gptq4-v2": _gptq(4, 128, False, version=2),
    "gptq4-outputs": _gptq(4, -1, True),
    "gptq8": _gptq(8, 64, True),
    "gptq8-zeros": _gptq(8, 128, False),
    "gptq8-outputs": _gptq(8, -1, True),
    "awq32": _awq(32),
    "awq64": _awq(64),
    "awq128": _awq(128),
    "w4a16": _packed(4, 128, True),
    "w4a16-zeros": _packed(4, 64, False),
    "w4a16-plain-zeros": _packed(4, 32, False, packs_zeros=False),
    "w8a16": _packed(8, -1, True),
    "w8a16-groups": _packed(8, 32, True),
    "w8a8": _int8(True),
    "w8a8-zeros": _int8(False),
    "fp8-outputs": _compressed(
        "float-quantized",
        _FLOAT8 | {"strategy": "channel"},
        lambda name, weight: _float8(name, weight, (1, weight.shape[1]), "weight_scale"),
    ),
    "fp8-tensor": _compressed(
        "float-quantized",
        _FLOAT8 | {"strategy": "tensor"},
        lambda name, weight: _float8(name, weight, None, "weight_scale"),
    ),
    "fp8-blocks": _compressed(
        "float-quantized",
        _FLOAT8 | {"strategy": "block", "block_structure": [128, 64]},
        lambda name, weight: _float8(name, weight, (128, 64), "weight_scale"),
    ),
    "deepseek-fp8": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        lambda name, weight: _float8(name, weight, (128, 128), "weight_scale_inv"),
    ),
}


def write_packed(plain: Path, packed: Path, widened: Path, form: Format) -> None:
    """Write the model in the folder ``plain`` twice: packed, and with the numbers that this stands for. Weights of
    projections are packed; the embedding, the head and norms stay as they are."""
    tensors: Tensors = {}
    numbers: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module, _, part = name.rpartition(".")
        if part == "weight" and tensor.dim() == 2 and ".layers." in name:
            made, numbers[name] = form.write(module, tensor)
            tensors |= made
        else:
            tensors[name] = numbers[name] = tensor
    _write(plain, packed, tensors, {"quantization_config": form.config})
    _write(plain, widened, numbers, {})


def _write(plain: Path, folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
