"""Reads weights from safetensors files: plain tensors as they are, packed ones as weights in few bits. No torch before
a weight is read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from .model_files import ModelLoadError
from .packed_safetensors import PackedTensor
from .weight_files import StoredTensor

if TYPE_CHECKING:
    import torch

    from ..layers.quantized_weights import ExpertsWeight, PackedWeight

_OPEN_FILES = 2
"""Tensors of one weight may lie on both sides of a border between files; more files are not kept mapped."""


class SafetensorsSource:
    """See `WeightSource`."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        """tensors: by their names in the text decoder, some of them `PackedTensor`s."""
        self.tensors = tensors
        self._handles: OrderedDict[Path, Any] = OrderedDict()

    def read(self, name: str) -> torch.Tensor | PackedWeight | ExpertsWeight:
        """See `WeightSource.read`."""
        stored = self.tensors[name]
        if not isinstance(stored, PackedTensor):
            return self._read_part(stored)
        from .unpacking import unpack_experts, unpack_weight

        parts = {part: self._read_part(tensor) for part, tensor in stored.parts.items()}
        if stored.settings.packing == "mxfp4":
            blocks, scales = parts.values()
            return unpack_experts(blocks, scales)
        return unpack_weight(stored, parts)

    def _read_part(self, stored: StoredTensor) -> torch.Tensor:
        file = stored.file
        try:
            handle = self._handles.pop(file, None) or safe_open(file, framework="pt")
            self._handles[file] = handle
            if len(self._handles) > _OPEN_FILES:
                self._handles.popitem(last=False)
            return handle.get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} cannot be read: {error}; download the file again") from error
