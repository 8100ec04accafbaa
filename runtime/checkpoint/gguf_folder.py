"""Makes the folder that stands for a GGUF file: config and tokenizer as a Hugging Face folder has them, and a link to
the file. No torch.

    model.gguf ──▶ $XDG_CACHE_HOME/baton/gguf/KEY/{config,generation_config,tokenizer,tokenizer_config}.json, model.gguf

All processes of a server read this folder as any other. It is made once; KEY changes with the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

from .gguf_config import generation_config, model_config, refuse_unknown_architecture
from .gguf_header import GGUFHeader, read_gguf_header, refuse_unread_types
from .gguf_names import ROPE_TENSORS, family_of
from .gguf_tokenizer import UnknownTokenizer, make_tokenizer, tokenizer_config
from .load_errors import ModelLoadError

logger = logging.getLogger(__name__)

LINK = "model.gguf"
MARK = "made_from_gguf.txt"
"""A file of the folder: the path of the GGUF file."""
NO_TOKENIZER = "no_tokenizer.txt"
"""In place of tokenizer.json: why there is none."""
_CONTRADICTIONS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, struct.error)
"""Raised where values of the metadata are of other types than converters write."""
_VERSION = 1
"""Raised whenever the files of the folder are made in another way."""


def gguf_folder(file: Path) -> Path:
    """The folder of a file. Raises ModelLoadError if the file cannot be served, or the folder not be made."""
    file = file.resolve()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "gguf"
    try:
        status = file.stat()
        identity = f"{_VERSION} {file} {status.st_size} {status.st_mtime_ns}"
        folder = cache / hashlib.sha256(identity.encode()).hexdigest()[:32]
        if (folder / LINK).exists():
            return folder
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror or error}") from error
    header = read_gguf_header(file)
    try:
        contents = _contents(header) | {MARK: f"{file}\n"}
    except _CONTRADICTIONS as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(
            f"{file} has metadata that contradict each other: {error!r}; convert the model again"
        ) from error
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            unfinished = Path(made) / "model"
            unfinished.mkdir()
            for name, content in contents.items():
                (unfinished / name).write_text(content, encoding="utf-8")
            (unfinished / LINK).symlink_to(file)
            try:
                unfinished.rename(folder)
            except OSError:
                if not (folder / LINK).exists():  # else another server was faster
                    raise
    except OSError as error:
        raise ModelLoadError(
            f"config and tokenizer of {file} cannot be kept in {cache} ({error}); set XDG_CACHE_HOME to a folder that "
            "can be written"
        ) from error
    logger.info("%s: config and tokenizer are kept in %s", file, folder)
    return folder


def _contents(header: GGUFHeader) -> dict[str, str]:
    """The text of each file of the folder. Raises ModelLoadError."""
    _refuse_parts(header)
    family = family_of(header)
    if family is None:
        raise refuse_unknown_architecture(header)
    refuse_unread_types(header)
    found = {
        "config.json": _json(model_config(header, family, _rope_factors(header))),
        "generation_config.json": _json(generation_config(header)),
    }
    try:
        found["tokenizer.json"] = make_tokenizer(header).to_str()
    except UnknownTokenizer as error:
        found[NO_TOKENIZER] = (
            f"{header.file} does not contain its whole tokenizer: {error}; set --tokenizer-path to the model's Hugging "
            "Face folder"
        )
    found["tokenizer_config.json"] = _json(tokenizer_config(header))
    return found


def _refuse_parts(header: GGUFHeader) -> None:
    """Raises ModelLoadError for a file that is one of several."""
    count = header.metadata.get("split.count")
    if isinstance(count, int) and count > 1:
        number = header.metadata.get("split.no", 0)
        raise ModelLoadError(
            f"{header.file} is part {number + 1} of {count} of a model. Files in parts are not read; join them with "
            "`llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf`, or take a release in one file"
        )
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelLoadError(f"{header.file} holds no model but {kind!r} (general.type); give the model's file")


def _rope_factors(header: GGUFHeader) -> dict[str, list[float]]:
    found = {}
    for name in ROPE_TENSORS:
        tensor = header.tensors.get(name)
        if tensor is None:
            continue
        if tensor.block.name != "F32" or tensor.num_bytes > 4096:
            raise ModelLoadError(f"{header.file}: {name} must be a few numbers of type F32; the file is damaged")
        with header.file.open("rb") as stream:
            stream.seek(tensor.start)
            data = stream.read(tensor.num_bytes)
        found[name] = list(struct.unpack(f"<{len(data) // 4}f", data))
    return found


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
