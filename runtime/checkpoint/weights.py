"""Fills a model's memory from safetensors files, or with seeded random numbers.

The model says which tensors it needs and where they go (`Decoder.checkpoint_views`); this file knows only names,
shapes and files. Each tensor is read once and copied to its place.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from .model_files import ModelLoadError, foreign_weights

# Tensors that some checkpoints carry although they are computed (inv_freq) or shared with the embedding (lm_head).
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
_TIED = "lm_head.weight"


def load_weights(views: dict[str, torch.Tensor], folder: Path) -> None:
    """Copy the checkpoint in folder into views (checkpoint name -> destination), converting the dtype.

    If a destination has one more leading dimension than the checkpoint tensor, every row gets a copy.
    Raises ModelLoadError naming what is missing, unexpected, of another shape, or unreadable.
    """
    missing, unexpected = set(views), []
    for file in tqdm(_checkpoint_files(folder), desc="Loading weights", unit="file", disable=None):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a safetensors handle is no dict
                    view = views.get(name)
                    if view is not None:
                        _copy(view, tensors.get_tensor(name), name)
                        missing.discard(name)
                    elif name != _TIED and not _IGNORED.search(name):
                        unexpected.append(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} cannot be read: {error}; download the file again") from error
    if missing or unexpected:
        problems = [
            f"{len(names)} {kind} tensor(s): {_shorten(names)}"
            for kind, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise ModelLoadError(f"the weights in {folder} do not fit its config.json; {'; '.join(problems)}")


def mapped_tensor(folder: Path, name: str) -> torch.Tensor | None:
    """A tensor of the checkpoint as the file has it, in its dtype: mapped, so that only what is read takes memory. None
    if there is no such tensor."""
    for file in _checkpoint_files(folder):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - a safetensors handle is no dict
                return tensors.get_tensor(name)
    return None


def fill_dummy(views: dict[str, torch.Tensor], *, seed: int = 0) -> None:
    """Seeded random weights, for benchmarks of shapes without a checkpoint at hand. Norm weights are one."""
    generator: torch.Generator | None = None
    for name, view in views.items():
        if name.endswith("norm.weight"):
            view.fill_(1.0)
            continue
        generator = generator or torch.Generator(view.device).manual_seed(seed)
        view.normal_(0.0, 0.02, generator=generator)


def _checkpoint_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{index} is no safetensors index: {error!r}; download it again") from error
        files = [folder / name for name in names]
        if absent := [file.name for file in files if not file.exists()]:
            raise ModelLoadError(f"{folder} lacks {_shorten(absent)}, which {index.name} names; download them")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        if trouble := foreign_weights(folder):
            raise ModelLoadError(f"{folder} {trouble}")
        raise ModelLoadError(
            f"{folder} has no *.safetensors file; convert the checkpoint to safetensors, "
            "or use --load-format dummy for random weights"
        )
    return files


def _copy(view: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    fits = view.shape == tensor.shape or (view.dim() == tensor.dim() + 1 and view.shape[1:] == tensor.shape)
    if not fits:
        raise ModelLoadError(
            f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(view.shape)}; "
            "config.json and weights are of different models"
        )
    view.copy_(tensor)


def _shorten(names) -> str:
    names = sorted(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
