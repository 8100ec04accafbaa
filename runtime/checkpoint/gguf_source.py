"""The weights of a GGUF file, in the names and the order of a Hugging Face checkpoint. No torch before a weight is
read.

    blk.0.attn_q.weight, Q4_K ──▶ model.layers.0.self_attn.q_proj.weight, a weight in 4 bits, its outputs reordered
    blk.0.ffn_up_exps.weight  ──▶ one weight for each expert
    blk.0.attn_norm.weight    ──▶ model.layers.0.input_layernorm.weight, less what the file has added to it
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from .gguf_header import PLAIN_TYPES, GGUFHeader, TensorInfo, read_gguf_header, refuse_unread_types
from .gguf_names import ROPE_TENSORS, checkpoint_name, family_of
from .load_errors import ModelLoadError
from .weight_files import StoredTensor

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..layers.quantized_weights import PackedWeight


@dataclass(frozen=True, slots=True)
class GGUFTensor(StoredTensor):
    """A weight; ``name`` is that in the file."""

    kind: str
    """Of its blocks, such as Q4_K."""
    start: int
    """First byte in the file."""
    num_bytes: int
    rotary_heads: int = 0
    """Heads whose outputs are in llama.cpp's order; 0: the order is that of the checkpoint."""
    offset: float = 0.0
    """What the file has added to all numbers."""

    @property
    def is_packed(self) -> bool:
        return self.kind not in PLAIN_TYPES


class GGUFSource:
    """See `WeightSource`."""

    def __init__(self, file: Path) -> None:
        """Raises ModelLoadError."""
        header = read_gguf_header(file, keeps_arrays=False)
        refuse_unread_types(header)
        self._file = file
        self.tensors = _weights(header)

    @cached_property
    def _mapped(self) -> np.ndarray:
        """The file's bytes. Their pages can be written, which never reaches the file: torch warns of others."""
        import numpy as np

        return np.memmap(self._file, dtype=np.uint8, mode="c")

    def read(self, name: str) -> torch.Tensor | PackedWeight:
        """See `WeightSource.read`."""
        import torch

        stored = self.tensors[name]
        try:
            mapped = self._mapped
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{self._file} cannot be read: {error}") from error
        if stored.start + stored.num_bytes > len(mapped):
            raise ModelLoadError(f"{self._file} has become shorter since its header was read; download it again")
        data = torch.from_numpy(mapped[stored.start : stored.start + stored.num_bytes])
        out = stored.shape[0]
        if not stored.is_packed:
            kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
            weight = data.view(kinds[stored.kind]).view(stored.shape)
            if stored.offset:
                weight = (weight.float() - stored.offset).to(weight.dtype)
            return weight[_checkpoint_order(out, stored.rotary_heads)] if stored.rotary_heads else weight
        from .gguf_blocks import unpack_blocks

        per_output = stored.num_bytes // out
        packed = unpack_blocks(stored.kind, data.view(-1, _block_bytes(stored, per_output)), out)
        return packed.outputs(_checkpoint_order(out, stored.rotary_heads)) if stored.rotary_heads else packed


def _block_bytes(stored: GGUFTensor, per_output: int) -> int:
    numbers = 256 if stored.kind.endswith("_K") else 32
    return per_output * numbers // stored.shape[1]


def _checkpoint_order(out: int, heads: int) -> torch.Tensor:
    """For each output of q or k in a checkpoint, its number in the file: there the two coordinates that a rotation
    turns lie side by side, here half a head apart."""
    import torch

    return torch.arange(out).view(heads, -1, 2).transpose(1, 2).flatten()


def _weights(header: GGUFHeader) -> dict[str, GGUFTensor]:
    """By their names in a checkpoint. Raises ModelLoadError."""
    family = family_of(header)
    if family is None:
        raise ModelLoadError(f"{header.file}: general.architecture {header.metadata.get('general.architecture')!r}")
    prefix = header.metadata["general.architecture"]
    heads = {
        "attn_q": header.metadata.get(f"{prefix}.attention.head_count"),
        "attn_k": header.metadata.get(f"{prefix}.attention.head_count_kv"),
    }
    heads["attn_k"] = heads["attn_k"] or heads["attn_q"]
    found: dict[str, GGUFTensor] = {}
    for info in header.tensors.values():
        if info.name in ROPE_TENSORS:
            continue
        name = checkpoint_name(info.name, family)
        if "{}" in name:
            found |= _experts(header, info, name)
            continue
        shape, rotary_heads = info.shape, 0
        part = info.name.split(".")[-2]
        if family.permutes and part in heads:
            rotary_heads = heads[part] or 0
            if not rotary_heads or shape[0] % (2 * rotary_heads):
                raise ModelLoadError(
                    f"{header.file}: tensor {info.name} has {shape[0]} outputs for {rotary_heads} heads; metadata and "
                    "tensors are of different models"
                )
        if part == "conv":
            shape = (shape[0], 1, *shape[1:])  # one channel in for each out
        elif part == "ffn_gate_inp_shexp" and len(shape) == 1:
            shape = (1, *shape)
        if info.block.name not in PLAIN_TYPES and len(shape) != 2:
            raise ModelLoadError(
                f"{header.file}: tensor {info.name} of shape {list(shape)} is in {info.block.name}, as only "
                "matrices can be"
            )
        found[name] = GGUFTensor(
            header.file,
            info.name,
            info.block.name,
            shape,
            info.block.name,
            info.start,
            info.num_bytes,
            rotary_heads,
            family.norm_offset if part.endswith("norm") and info.name.endswith(".weight") else 0.0,
        )
    return found


def _experts(header: GGUFHeader, info: TensorInfo, name: str) -> dict[str, GGUFTensor]:
    """The weights of all experts of a layer, which lie one after the other. Raises ModelLoadError."""
    if len(info.shape) != 3:
        raise ModelLoadError(
            f"{header.file}: tensor {info.name} has shape {list(info.shape)}; those of experts have three dimensions"
        )
    num_experts, size = info.shape[0], info.num_bytes // info.shape[0]
    kind = info.block.name
    return {
        name.format(expert): GGUFTensor(
            header.file, info.name, kind, info.shape[1:], kind, info.start + expert * size, size
        )
        for expert in range(num_experts)
    }
