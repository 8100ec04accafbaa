"""Fills a model's memory from safetensors files, or with seeded random numbers.

The model says which tensors it needs and where they go (`Decoder.checkpoint_views`); this file knows only names,
shapes and files. Names and shapes are compared with the files' headers before any number is read. Then each tensor is
read once and copied to its place.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from .model_files import ModelLoadError
from .tensor_names import TIED_HEAD, ignored_reason
from .text_part import text_part
from .weight_files import StoredTensor, shorten, text_tensors

logger = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_COMPARED_ROWS = 4096
"""Rows of the head and the embedding that are compared at a time."""


def load_weights(views: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Copy the checkpoint in folder into views (checkpoint name -> destination), converting the dtype.

    If a destination has one more leading dimension than the checkpoint tensor, every row gets a copy.
    Raises ModelLoadError naming what is missing, unexpected, of another shape, unreadable, NaN or infinite, and a head
    that the config ties to the embedding although it differs from it.
    """
    tensors = text_tensors(folder)
    _check_fit(views, tensors, folder)
    for file, names in tqdm(_by_file(tensors, views), desc="Loading weights", unit="file", disable=None):
        with _opened(file) as handle:
            for name in names:
                tensor = handle.get_tensor(tensors[name].name)
                views[name].copy_(tensor)
                _check_finite(views[name], tensor, name, file)
    if TIED_HEAD in tensors and TIED_HEAD not in views and _EMBEDDING in views:
        _check_tied(tensors, folder)


def mapped_tensor(folder: Path, name: str) -> torch.Tensor | None:
    """A tensor of the checkpoint as the file has it, in its dtype: mapped, so that only what is read takes memory. None
    if there is no such tensor."""
    stored = text_tensors(folder).get(name)
    if stored is None:
        return None
    with _opened(stored.file) as handle:
        return handle.get_tensor(stored.name)


def fill_dummy(views: dict[str, torch.Tensor], *, seed: int = 0) -> None:
    """Seeded random weights, for benchmarks of shapes without a checkpoint at hand. Norm weights are one."""
    generator: torch.Generator | None = None
    for name, view in views.items():
        if name.endswith("norm.weight"):
            view.fill_(1.0)
            continue
        generator = generator or torch.Generator(view.device).manual_seed(seed)
        view.normal_(0.0, 0.02, generator=generator)


def _check_fit(views: Mapping[str, torch.Tensor], tensors: Mapping[str, StoredTensor], folder: Path) -> None:
    """Raises ModelLoadError unless the tensors are those that the model needs, and harmless ones. Logs the latter."""
    config = _text_config(folder)
    surplus: list[str] = []
    ignored: Counter[str] = Counter()
    for name in tensors:
        if name not in views:
            reason = ignored_reason(name, config)
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


def _fits(view: torch.Tensor, shape: tuple[int, ...]) -> bool:
    return tuple(view.shape) == shape or (view.dim() == len(shape) + 1 and tuple(view.shape[1:]) == shape)


def _check_finite(view: torch.Tensor, tensor: torch.Tensor, name: str, file: Path) -> None:
    """Raises ModelLoadError if a weight is NaN or infinite; one pass over the memory, without a copy."""
    if not view.is_floating_point() or view.element_size() < 2 or view.numel() == 0:
        return
    if all(map(torch.isfinite, torch.aminmax(view))):
        return
    where = f"tensor {name} in {file}"
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


def _check_tied(tensors: Mapping[str, StoredTensor], folder: Path) -> None:
    """Raises ModelLoadError if the head, which is not read, is not the embedding. Numbers are compared as stored."""
    head, embedding = mapped_tensor(folder, TIED_HEAD), mapped_tensor(folder, _EMBEDDING)
    assert head is not None and embedding is not None
    same = head.shape == embedding.shape and all(
        torch.equal(head[row : row + _COMPARED_ROWS], embedding[row : row + _COMPARED_ROWS].to(head.dtype))
        for row in range(0, len(head), _COMPARED_ROWS)
    )
    if not same:
        raise ModelLoadError(
            f"{folder / 'config.json'} ties the head to the embedding (tie_word_embeddings), but {TIED_HEAD} in "
            f"{tensors[TIED_HEAD].file.name} differs from {_EMBEDDING}; set tie_word_embeddings to false, or remove "
            f"{TIED_HEAD} from the file"
        )


def _text_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return text_part(config) or config


def _by_file(tensors: Mapping[str, StoredTensor], wanted: Mapping[str, Any]) -> list[tuple[Path, list[str]]]:
    files: dict[Path, list[str]] = {}
    for name, tensor in tensors.items():
        if name in wanted:
            files.setdefault(tensor.file, []).append(name)
    return sorted(files.items())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}; download the file again") from error


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
