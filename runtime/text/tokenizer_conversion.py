"""Converts tokenizers in older formats to tokenizer.json, once, and keeps the result in the user's cache.

    tokenizer.model (SentencePiece, tiktoken) │ vocab.json + merges.txt │ tekken.json │ *.tiktoken
        ──▶ transformers' converters, in a process of their own ──▶ tokenizer.json, tokenizer_config.json

transformers imports torch, which the processes that tokenise must not load; so this module starts itself as a child
(``python -m baton.runtime.text.tokenizer_conversion FOLDER OUTPUT``) and imports nothing large otherwise.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_CONFIG_FILES = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "config.json")
"""Files that change the result."""

_TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""Special tokens of every tekken.json, which does not say what each is for."""

_TIMEOUT_S = 600.0


class ConversionFailed(ValueError):
    """The tokenizer cannot be converted; the message says why."""


def tokenizer_sources(folder: Path) -> list[Path]:
    """Files of a folder that hold a tokenizer in an older format; empty if there is none."""
    names = ["tekken.json", "tokenizer.model", "tiktoken.model"]
    if (folder / "merges.txt").is_file():
        names += ["vocab.json", "merges.txt"]
    found = [folder / name for name in names if (folder / name).is_file()]
    return found + sorted(folder.glob("*.tiktoken"))


def converted_folder(folder: Path) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json made from those older files of ``folder``, in the cache:
    $XDG_CACHE_HOME/baton/tokenizers, or ~/.cache. Takes seconds the first time. Raises ConversionFailed."""
    sources = tokenizer_sources(folder)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "tokenizers"
    try:
        output = cache / _fingerprint([*sources, *(folder / name for name in _CONFIG_FILES)])
        if (output / "tokenizer.json").is_file():
            return output
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            unfinished = Path(made) / "tokenizer"
            _run_child(folder, unfinished)
            try:
                unfinished.rename(output)
            except OSError:
                if not (output / "tokenizer.json").is_file():  # else another server was faster
                    raise
    except OSError as error:
        raise ConversionFailed(
            f"no tokenizer.json in {str(folder)!r}, and one converted from {sources[0].name} cannot be kept in {cache} "
            f"({error}); set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    names = ", ".join(file.name for file in sources)
    logger.info("no tokenizer.json in %s: converted %s, kept in %s", folder, names, output)
    return output


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256(importlib.metadata.version("transformers").encode())
    for file in files:
        if file.is_file():
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _run_child(folder: Path, output: Path) -> None:
    command = [sys.executable, "-P", "-m", __spec__.name, str(folder.resolve()), str(output)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConversionFailed(f"converting the tokenizer in {folder} took longer than {_TIMEOUT_S:g} s") from None
    if child.returncode or not (output / "tokenizer.json").is_file():
        reason = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise ConversionFailed(
            f"no tokenizer.json in {str(folder)!r}, and its {tokenizer_sources(folder)[0].name} cannot be converted: "
            f"{reason[:400]}; or set --tokenizer-path to a folder that has one"
        )


def convert(folder: str, output: str) -> None:
    """Write the converted tokenizer to the folder ``output``. Raises what transformers raises, and ImportError."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    is_tekken = (Path(folder) / "tekken.json").is_file()
    # Tekken with mistral-common installed would otherwise load as a tokenizer of Python.
    options = {"mistral_format": False, **_TEKKEN_NAMES} if is_tekken else {}
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(f"transformers has no tokenizer.json form of {type(tokenizer).__name__}")
    if is_tekken:  # mistral-common puts this token before every prompt; no file says so
        bos = _TEKKEN_NAMES["bos_token"]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.convert_tokens_to_ids(bos))]
        )
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    convert(*sys.argv[1:])
