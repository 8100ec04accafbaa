"""Where the weights of a model come from: the seam between the formats of files and the code that loads them. No torch
before a weight is read.

    folder ──▶ open_source ──▶ tensors: name, shape and type of each weight ──▶ compared with config.json and model
                          └──▶ read(name): its numbers, as a tensor or as a weight in few bits

Names are those of the text decoder (`tensor_names`), shapes those of the weights that the numbers stand for, whatever
the files pack them into.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .gguf_folder import LINK, MARK
from .gguf_source import GGUFSource
from .load_errors import ModelLoadError
from .packed_safetensors import packed_tensors
from .quantization_config import read_quantization
from .safetensors_source import SafetensorsSource
from .weight_files import StoredTensor, shorten, text_tensors

if TYPE_CHECKING:
    import torch

    from ..layers.quantized_weights import ExpertsWeight, PackedWeight


class WeightSource(Protocol):
    """The weights of one checkpoint."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All weights, by name. Only headers are read for this."""
        ...

    def read(self, name: str) -> torch.Tensor | PackedWeight | ExpertsWeight:
        """The numbers of a weight, as its file has them, nothing rounded but what the format's docstring says. Plain
        tensors are mapped: only what is read of them takes memory. Raises ModelLoadError."""
        ...


def open_source(folder: Path) -> WeightSource:
    """The weights in a model's folder. Raises ModelLoadError if there are none, if they cannot be read, or if
    config.json and tensors contradict each other about how they are packed."""
    if (folder / MARK).exists():
        return GGUFSource(folder / LINK)
    tensors = text_tensors(folder)
    if (quantization := read_quantization(folder)) is not None:
        return SafetensorsSource(packed_tensors(tensors, quantization, folder))
    if packed := [name for name in tensors if name.endswith((".qweight", ".weight_packed"))]:
        raise ModelLoadError(
            f"{folder} holds weights in few bits ({shorten(packed)}), but its config.json has no quantization_config "
            "that says how they are packed; download config.json of the same release"
        )
    return SafetensorsSource(tensors)


def has_weights(folder: Path) -> bool:
    """False for a folder with nothing but a config."""
    return (folder / MARK).exists() or any(folder.glob("*.safetensors"))
