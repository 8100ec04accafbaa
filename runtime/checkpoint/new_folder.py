"""Writes a new model folder from another one: the whole folder, or none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from .model_files import PATTERNS
from .pooling_files import module_configs

PICKLE_INDEX = "pytorch_model.bin.index.json"


class ConversionError(ValueError):
    """The folder cannot be converted; the message says why and what to change."""


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Gives a folder to write to, which becomes ``output`` at the end, or is deleted if anything fails. Raises
    ConversionError if ``output`` exists or cannot be written."""
    if output.exists():
        raise ConversionError(f"--output {output} exists already; give the name of a new folder")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as made:
            unfinished = Path(made) / "model"
            unfinished.mkdir()
            yield unfinished
            unfinished.rename(output)
    except (OSError, SafetensorError) as error:
        raise ConversionError(f"cannot write {output}: {error}") from error


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file that other users can read. Raises OSError and SafetensorError."""
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors allows the owner alone


def copy_others(folder: Path, output: Path) -> None:
    """Copy config, tokenizer and templates, and the configs of an embedding model's modules."""
    for pattern in PATTERNS:
        for file in sorted(folder.glob(pattern)):
            if file.is_file() and file.name != PICKLE_INDEX and file.suffix != ".safetensors":
                shutil.copyfile(file, output / file.name)
    if (templates := folder / "additional_chat_templates").is_dir():
        shutil.copytree(templates, output / templates.name)
    for config in module_configs(folder):
        (output / config).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / config, output / config)
