"""Fills a model's memory from the files of a checkpoint, or with seeded random numbers.

The model says which tensors it needs and where they go (`Decoder.checkpoint_views`); this file knows only names and
shapes, and a `WeightSource` that reads them. Names and shapes are compared with the files' headers before any number is
read. Then each tensor is read once and copied to its place.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from ..layers.quantized_weights import ExpertsWeight, PackedWeight, QuantizedWeight
from .model_files import ModelLoadError
from .packed_safetensors import PackedTensor
from .tensor_names import TIED_HEAD, ignored_reason
from .text_part import text_part
from .weight_files import shorten
from .weight_source import WeightSource, open_source

logger = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_COMPARED_ROWS = 4096
"""Rows of the head and the embedding that are compared at a time."""


_WIDENED_ROWS = 1024
"""Rows of a weight in few bits that are widened to floats at a time."""


class WeightSlot(Protocol):
    """A place for a weight, in whatever form it has."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]"""
        ...

    def store(self, weight: torch.Tensor | PackedWeight | ExpertsWeight) -> None:
        """Take a weight of this shape. A tensor may be mapped from its file: copy it."""
        ...


def load_weights(destinations: Mapping[str, torch.Tensor | WeightSlot], folder: Path) -> None:
    """Copy the checkpoint in folder into destinations (checkpoint name -> memory), converting the dtype.

    A weight in few bits is widened if its destination is a tensor; a slot gets it as it is. If a destination has one
    more leading dimension than the checkpoint tensor, every row gets a copy.
    Raises ModelLoadError naming what is missing, unexpected, of another shape, unreadable, NaN or infinite, and a head
    that the config ties to the embedding although it differs from it.
    """
    source = open_source(folder)
    check_tensors(destinations, source, folder)
    names = [name for name in source.tensors if name in destinations]
    names.sort(key=lambda name: source.tensors[name].file)
    for name in tqdm(names, desc="Loading weights", unit="tensor", disable=None):
        weight, destination = source.read(name), destinations[name]
        where = f"tensor {name} in {source.tensors[name].file}"
        if not isinstance(weight, torch.Tensor):
            _check_finite_scales(weight, where)
        if not isinstance(destination, torch.Tensor):
            if isinstance(weight, torch.Tensor):
                _check_finite(weight, weight, where)
            destination.store(weight)
            continue
        if isinstance(weight, torch.Tensor):
            destination.copy_(weight)
        else:
            _widen(weight, destination)
        _check_finite(destination, weight, where)
    check_tied(destinations, source, folder)


def mapped_tensor(folder: Path, name: str) -> torch.Tensor | None:
    """A tensor of the checkpoint as the file has it, in its dtype: mapped, so that only what is read takes memory. None
    if there is no such tensor, or if it is in few bits."""
    source = open_source(folder)
    if name not in source.tensors or source.tensors[name].is_packed:
        return None
    weight = source.read(name)
    assert isinstance(weight, torch.Tensor)
    return weight


def _widen(weight: PackedWeight | ExpertsWeight, destination: torch.Tensor) -> None:
    """destination: [out, in], or [copies, out, in]; of experts [experts, in, out]"""
    if isinstance(weight, ExpertsWeight):
        for number in range(len(weight.experts)):
            destination[number].copy_(weight.experts[number].dequantized().t())
        return
    for start in range(0, weight.shape[0], _WIDENED_ROWS):
        rows = slice(start, start + _WIDENED_ROWS)
        destination[..., rows, :].copy_(weight.outputs(rows).dequantized())


def packed_kinds(folder: Path) -> set[str]:
    """The numbers of those weights of the checkpoint that are in few bits: "integers", "float8". Raises
    ModelLoadError."""
    packed = (tensor for tensor in open_source(folder).tensors.values() if tensor.is_packed)
    return {"float8" if _is_float8(tensor) else "integers" for tensor in packed}


def _is_float8(tensor: object) -> bool:
    return isinstance(tensor, PackedTensor) and tensor.settings.packing == "float8"


def fill_dummy(views: Mapping[str, torch.Tensor | WeightSlot], *, seed: int = 0) -> None:
    """Seeded random weights, for benchmarks of shapes without a checkpoint at hand. Norm weights are one."""
    generator: torch.Generator | None = None
    of_slots = torch.Generator().manual_seed(seed)
    for name, view in views.items():
        if not isinstance(view, torch.Tensor):
            view.store(torch.randn(view.shape, generator=of_slots).mul_(0.02))
            continue
        if name.endswith("norm.weight"):
            view.fill_(1.0)
            continue
        generator = generator or torch.Generator(view.device).manual_seed(seed)
        view.normal_(0.0, 0.02, generator=generator)


def check_tensors(views: Mapping[str, torch.Tensor | WeightSlot], source: WeightSource, folder: Path) -> None:
    """Raises ModelLoadError unless the tensors are those that the model needs, and harmless ones. Logs the latter."""
    tensors, config = source.tensors, _text_config(folder)
    surplus: list[str] = []
    ignored: Counter[str] = Counter()
    for name in tensors:
        if name not in views:
            reason = ignored_reason(name, config)
            if reason is None and _is_zero_bias(name, source):
                reason = "biases of quantised layers, all of them 0"
            if reason is None:
                surplus.append(name)
            else:
                ignored[reason] += 1
    missing = [name for name in views if name not in tensors]
    problems = [
        f"{len(names)} {kind} tensor(s): {shorten(names)}"
        for kind, names in (("missing", missing), ("unexpected", surplus))
        if names
    ]
    if missing == [TIED_HEAD]:
        problems.append("if the model's head is its embedding, set tie_word_embeddings to true in config.json")
    problems += [
        f"tensor {name} ({tensors[name].file.name}) has shape {list(tensors[name].shape)}, config.json asks for "
        f"{list(view.shape)}"
        for name, view in views.items()
        if name in tensors and not _fits(view, tensors[name].shape)
    ][:4]
    if problems:
        raise ModelLoadError(
            f"the weights in {folder} do not fit its config.json; {'; '.join(problems)}; "
            "config.json and weights are of different models, or the download is not complete"
        )
    if ignored:
        what = ", ".join(f"{count} of {reason}" for reason, count in ignored.items())
        logger.info("tensors that the model does not need: %s", what)


def _fits(view: torch.Tensor | WeightSlot, shape: tuple[int, ...]) -> bool:
    if not isinstance(view, torch.Tensor):
        return tuple(view.shape) == shape
    return tuple(view.shape) == shape or (len(view.shape) == len(shape) + 1 and tuple(view.shape[1:]) == shape)


def _is_zero_bias(name: str, source: WeightSource) -> bool:
    """True for a bias that quantisers have added to a layer without one."""
    module, _, part = name.rpartition(".")
    weight = source.tensors.get(f"{module}.weight")
    if part != "bias" or weight is None or not weight.is_packed:
        return False
    bias = source.read(name)
    return isinstance(bias, torch.Tensor) and not bias.any()


def _check_finite(view: torch.Tensor, weight: torch.Tensor | PackedWeight | ExpertsWeight, where: str) -> None:
    """Raises ModelLoadError if a weight is NaN or infinite; one pass over the memory, without a copy."""
    if not view.is_floating_point() or view.element_size() < 2 or view.numel() == 0:
        return
    if all(map(torch.isfinite, torch.aminmax(view))):
        return
    tensor = weight if isinstance(weight, torch.Tensor) else weight.dequantized()
    bad = int(tensor.numel() - torch.isfinite(tensor).sum())
    if not bad:
        largest = float(tensor.abs().max())
        raise ModelLoadError(
            f"{where} has numbers up to {largest:g}, which are infinite in {_dtype(view)}; use --dtype {_dtype(tensor)}"
        )
    raise ModelLoadError(
        f"{where} holds {bad} number(s) that are NaN or infinite, of {tensor.numel()}; every output would be wrong: "
        "download the file again, or take another checkpoint"
    )


def _check_finite_scales(weight: PackedWeight | ExpertsWeight, where: str) -> None:
    """`_check_finite` for a weight in few bits, which is not widened for this."""
    if isinstance(weight, ExpertsWeight):
        for expert in weight.experts:
            _check_finite_scales(expert, where)
        return
    tables = [weight.scales]
    if isinstance(weight, QuantizedWeight):
        tables += [weight.rows, weight.mins]
        bad = 0
    else:
        bad = int((weight.codes.view(torch.uint8) & 127 == 127).sum())  # its only NaNs; it has no infinity
    bad += sum(int(table.numel() - torch.isfinite(table).sum()) for table in tables if table is not None)
    if bad:
        raise ModelLoadError(
            f"{where} has {bad} scale(s) or code(s) that are NaN or infinite; every output would be wrong: download "
            "the file again, or take another checkpoint"
        )


def check_tied(destinations: Mapping[str, torch.Tensor | WeightSlot], source: WeightSource, folder: Path) -> None:
    """Raises ModelLoadError if there is a head that is not read, and it is not the embedding. Numbers are compared as
    stored."""
    if TIED_HEAD not in source.tensors or TIED_HEAD in destinations or _EMBEDDING not in destinations:
        return
    head, embedding = source.read(TIED_HEAD), source.read(_EMBEDDING)
    assert not isinstance(head, ExpertsWeight) and not isinstance(embedding, ExpertsWeight)
    same = tuple(head.shape) == tuple(embedding.shape) and all(
        torch.equal(*_as_one_dtype(_rows(head, row), _rows(embedding, row)))
        for row in range(0, head.shape[0], _COMPARED_ROWS)
    )
    if not same:
        raise ModelLoadError(
            f"{folder / 'config.json'} ties the head to the embedding (tie_word_embeddings), but {TIED_HEAD} in "
            f"{source.tensors[TIED_HEAD].file.name} differs from {_EMBEDDING}; set tie_word_embeddings to false, or "
            f"remove {TIED_HEAD} from the file"
        )


def _rows(weight: torch.Tensor | PackedWeight, start: int) -> torch.Tensor:
    rows = slice(start, start + _COMPARED_ROWS)
    return weight[rows] if isinstance(weight, torch.Tensor) else weight.outputs(rows).dequantized()


def _as_one_dtype(head: torch.Tensor, embedding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return head, embedding.to(head.dtype)


def _text_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return text_part(config) or config


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
