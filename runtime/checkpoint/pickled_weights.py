"""Converts a folder of weights that torch.save wrote to safetensors, once. Nothing else in Baton reads such files.

torch.save writes pickles, and a pickle can run any code when it is loaded. `convert_folder` loads with
``weights_only=True``: torch's own unpickler, which builds tensors and plain containers and refuses everything else.
The output is a folder that the server reads like any other: one safetensors file per input file, an index, and the
config and tokenizer files.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

from .model_files import PICKLE_SUFFIXES
from .new_folder import PICKLE_INDEX, ConversionError, copy_others, new_folder, save_tensors
from .weight_files import INDEX_FILE, SINGLE_FILE, shorten

_SHARD = re.compile(r"pytorch_model-\d+-of-(\d+)\.bin")
_LFS_POINTER = b"version https://git-lfs"
_ZIP, _PICKLE = b"PK", b"\x80"
"""Beginnings of files of torch.save: archives, and before torch 1.6 pickles, of protocol 2 or later."""
_TRAINING_STATE = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|trainer_state|random_states).*")
"""Beginnings of names of files that trainers write beside the weights."""


def convert_folder(folder: Path, output: Path) -> list[Path]:
    """Convert the pickled weights in ``folder``; returns the safetensors files in ``output``, a new folder.

    Takes as much memory as the largest input file. ``output`` appears when everything in it is written.
    Raises ConversionError.
    """
    if not folder.is_dir():
        raise ConversionError(f"{folder} is no folder")
    files = pickled_files(folder)
    with new_folder(output) as unfinished:
        names = _write_weights(files, unfinished)
        copy_others(folder, unfinished)
    return [output / name for name in names]


def pickled_files(folder: Path) -> list[Path]:
    """The files of the folder that hold its weights, in order: those that the index names, else a complete set of
    shards, else the only file. Raises ConversionError."""
    index = folder / PICKLE_INDEX
    if index.exists():
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            names = sorted(Path(name).name for name in named)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConversionError(f"{index} is no index of weights: {error!r}; download it again") from error
    else:
        names = sorted(
            file.name
            for file in folder.iterdir()
            if file.suffix in PICKLE_SUFFIXES and file.is_file() and not _TRAINING_STATE.match(file.name)
        )
        if original := [name for name in names if name.startswith("consolidated.")]:
            raise ConversionError(
                f"{folder / original[0]} is in Meta's own format, whose tensor names are not those of Hugging Face; "
                "convert it with the script that transformers has for the model, or give a release for transformers"
            )
        if shards := [(name, match) for name in names if (match := _SHARD.fullmatch(name))]:
            total = int(shards[0][1][1])
            if len(shards) != total:
                raise ConversionError(f"{folder} has {len(shards)} of {total} shards pytorch_model-*.bin")
            names = [name for name, _ in shards]
        elif "pytorch_model.bin" in names:
            names = ["pytorch_model.bin"]
        elif len(names) > 1:
            raise ConversionError(
                f"{folder} has several files of weights and no {PICKLE_INDEX}: {', '.join(names)}; leave those of one "
                "model"
            )
    if not names:
        raise ConversionError(
            f"{folder} has no weights to convert: no file {', '.join(f'*{s}' for s in PICKLE_SUFFIXES)}"
        )
    files = [folder / name for name in names]
    if absent := [file.name for file in files if not file.exists()]:
        raise ConversionError(f"{folder} lacks {shorten(absent)}, which {PICKLE_INDEX} names; download them")
    return files


def _write_weights(files: list[Path], output: Path) -> list[str]:
    """Returns the names of the files written."""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    written = []
    for number, file in enumerate(files, start=1):
        name = SINGLE_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = _unshared(_load(file))
        if twice := weight_map.keys() & tensors:
            raise ConversionError(f"{file} holds tensors that an earlier file holds, too: {shorten(twice)}")
        save_tensors(tensors, output / name)
        weight_map |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        written.append(name)
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (output / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return written


def _load(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file. Raises ConversionError if it holds anything that is no tensor."""
    _refuse_other_files(file)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # a newer one loads, or is refused
            # Files from before torch 1.6 are no zip archives and cannot be mapped.
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"it asks for {wanted[1]}, which is not part of any weights" if wanted else "it holds more than tensors"
        raise ConversionError(
            f"{file} is refused: loading it would run code ({what}); take a release of the model in safetensors"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ConversionError(f"{file} cannot be read: {error}; download the file again") from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]  # as Lightning and older trainers wrap it
    if not isinstance(content, Mapping) or not content:
        raise ConversionError(f"{file} holds a {type(content).__name__}, not tensors by name")
    if others := [str(name) for name, value in content.items() if not _is_dense(value)]:
        raise ConversionError(
            f"{file} holds entries that are no dense tensors: {shorten(others)}; is it a training state?"
        )
    return dict(content)


def _refuse_other_files(file: Path) -> None:
    """Raises ConversionError for a file that torch.save has not written, such as what a download leaves in its
    place."""
    try:
        with file.open("rb") as stream:
            start = stream.read(64)
    except OSError as error:
        raise ConversionError(f"{file} cannot be read: {error.strerror or error}") from error
    if start.startswith(_LFS_POINTER):
        raise ConversionError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
    if not start.startswith((_ZIP, _PICKLE)):
        what = "is empty" if not start else f"is no file of torch.save: it begins with {start[:16]!r}"
        raise ConversionError(f"{file} {what}; download the file again")


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, contiguous and each with memory of its own, as safetensors requires. Pickles may hold several
    views of one memory, such as a head that is the embedding."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.detach().clone() if storage in seen else tensor.detach().contiguous()
        seen.add(storage)
    return apart
