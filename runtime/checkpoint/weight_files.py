"""Finds the safetensors files of a model folder and reads their headers: names, dtypes and shapes. No torch.

A header is the JSON at the start of a file; the numbers behind it are not read. So the whole checkpoint is known, and
checked against the config, in milliseconds and before anything expensive starts.

Which files make up the checkpoint, the first of these that is there:

- the files that model.safetensors.index.json names, each tensor from the file that it names
- model.safetensors
- model-00001-of-0000N.safetensors … without an index, if all N are there
- any other *.safetensors, without adapters, and without consolidated*.safetensors if others remain

Mistral's releases hold every tensor twice: as model-*.safetensors with an index, in the names of Hugging Face, and as
consolidated*.safetensors in names of their own. The rules above read the former only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model_files import ModelLoadError, foreign_weights
from .tensor_names import text_tensor_name

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_MISTRAL_NAME = re.compile(r"layers\.\d+\.attention\.wq\.")
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""

_ELEMENT_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint. dtype in the spelling of safetensors: F32, BF16, …"""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_packed(self) -> bool:
        """True for a weight in few bits; then ``dtype`` names its format, and shape is that of its numbers."""
        return False


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint in ``folder``, by their names in the files.

    Raises ModelLoadError naming a file that is absent, cut short or no safetensors file, and a tensor that the index
    names and its file lacks.
    """
    weight_map = _read_index(folder)
    if weight_map is None:
        found: dict[str, StoredTensor] = {}
        for file in _files_without_index(folder):
            for name, tensor in read_header(file).items():
                if name in found:
                    raise ModelLoadError(
                        f"{file.name} and {found[name].file.name} in {folder} both hold tensor {name}, and there is no "
                        f"{INDEX_FILE} to say which counts; remove the file that does not belong to this model"
                    )
                found[name] = tensor
        if found and any(_MISTRAL_NAME.match(name) for name in found):
            raise ModelLoadError(
                f"{folder} holds its weights in Mistral's own format only (consolidated*.safetensors); "
                "give a folder that has model*.safetensors in Hugging Face's names as well"
            )
        return found
    headers = {file: read_header(folder / file) for file in sorted(set(weight_map.values()))}
    if absent := [f"{name} ({file})" for name, file in weight_map.items() if name not in headers[file]]:
        raise ModelLoadError(
            f"{folder / INDEX_FILE} names tensors that their files do not hold: {shorten(absent)}; "
            "index and weights are of different downloads: download the folder again"
        )
    found = {name: headers[file][name] for name, file in weight_map.items()}
    for header in headers.values():  # what the index forgot is still there
        for name, tensor in header.items():
            found.setdefault(name, tensor)
    return found


def text_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint's text part, by their names in a checkpoint of the text part alone
    (`tensor_names`). Raises ModelLoadError."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored_tensors(folder).items():
        text_name = text_tensor_name(name)
        if text_name is None:
            continue
        if text_name in found:
            raise ModelLoadError(
                f"{folder} holds {text_name} twice, as {found[text_name].name} and as {name}; "
                "remove the file that does not belong to this model"
            )
        found[text_name] = tensor
    return found


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. Raises ModelLoadError if it is none, or not all of one."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version " and stream.read(32).startswith(b"https://git-lfs"):
                raise ModelLoadError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
            if len(start) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelLoadError(
                    f"{file} cannot be read: {size} bytes are too few for its header; download the file again"
                )
            stream.seek(8)
            header = json.loads(stream.read(length))
        return _read_entries(file, header, size - 8 - length)
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(
            f"{file} cannot be read: it is no safetensors file ({error!r}); download the file again"
        ) from error


def _read_entries(file: Path, header: dict[str, Any], data_bytes: int) -> dict[str, StoredTensor]:
    found = {}
    needed = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensor = StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]))
        begin, end = entry["data_offsets"]
        num_elements = 1
        for length in tensor.shape:
            num_elements *= length
        bits = _ELEMENT_BITS.get(tensor.dtype)
        if bits is not None and num_elements * bits != 8 * (end - begin):
            raise ModelLoadError(
                f"{file}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, but takes {end - begin} bytes; "
                "download the file again"
            )
        needed = max(needed, end)
        found[name] = tensor
    if needed != data_bytes:
        cut = "was the download cut short? Download the file again" if needed > data_bytes else "download it again"
        raise ModelLoadError(
            f"{file} cannot be read: its header describes {needed} bytes of tensors, the file has {data_bytes}; {cut}"
        )
    return found


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor -> file name, as the index has it; None without one. Raises ModelLoadError, also for files not there."""
    index = folder / INDEX_FILE
    if not index.exists():
        return None
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(weight_map.values()))
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ValueError("a file name of the weight_map is not one of this folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is no safetensors index: {error!r}; download it again") from error
    if absent := [name for name in names if not (folder / name).exists()]:
        raise ModelLoadError(f"{folder} lacks {shorten(absent)}, which {index.name} names; download them")
    return weight_map


def _files_without_index(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    files = [file for file in sorted(folder.glob("*.safetensors")) if file.name != "adapter_model.safetensors"]
    shards = {file.name: match for file in files if (match := _SHARD.fullmatch(file.name))}
    if shards:
        number, total = next(iter(shards.values())).groups()
        wanted = [f"model-{i:0{len(number)}}-of-{total}.safetensors" for i in range(1, int(total) + 1)]
        if absent := [name for name in wanted if name not in shards]:
            raise ModelLoadError(f"{folder} lacks {shorten(absent)}, of {int(total)} shards; download them")
        return [folder / name for name in wanted]
    files = [file for file in files if not file.name.startswith("consolidated")] or files
    if files:
        return files
    if trouble := foreign_weights(folder):
        raise ModelLoadError(f"{folder} {trouble}")
    raise ModelLoadError(
        f"{folder} has no *.safetensors file; give a folder with the model's weights, "
        "or use --load-format dummy for random weights"
    )


def shorten(names: Iterable[str]) -> str:
    """The first names of a list, and how many more there are, for an error message."""
    names = sorted(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
