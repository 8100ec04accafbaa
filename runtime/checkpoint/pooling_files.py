"""Reads from the files of sentence-transformers how a checkpoint pools prompts. No torch.

    modules.json ──▶ Transformer, Pooling (its folder's config.json says how), Normalize

A checkpoint without these files is pooled at the last token and normalised, which is vLLM's default too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...scheduler.request_spec import PoolingKind
from ..model_config import EmbeddingConfig
from .model_files import ModelLoadError

MODULES_FILE = "modules.json"

_KINDS: dict[str, PoolingKind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_NAMED: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_ONLY = "the poolings that are served are lasttoken, mean and cls"


def read_embedding_config(folder: Path) -> EmbeddingConfig:
    """Read modules.json and the pooling's config.json; without them, return the defaults. Raises ModelLoadError for
    files that cannot be read."""
    modules = _read(folder / MODULES_FILE)
    if modules is None:
        return EmbeddingConfig()
    if not isinstance(modules, list) or not all(isinstance(each, Mapping) for each in modules):
        raise ModelLoadError(f"{folder / MODULES_FILE} must hold a list of objects")
    pooling: PoolingKind = "last"
    normalizes, refusal = False, ""
    for module in modules:
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path") or "")
        if kind == "Normalize":
            normalizes = True
        elif kind == "Pooling":
            found = _pooling_of(_read(folder / path / "config.json"))
            if found is None:
                refusal = f"{path}/config.json of this model asks for another pooling; {_ONLY}"
            else:
                pooling = found
        elif kind != "Transformer":
            refusal = f"{MODULES_FILE} of this model has a module of type {kind}, which is not served"
    return EmbeddingConfig(is_embedder=True, pooling=pooling, normalizes=normalizes, refusal=refusal)


def module_configs(folder: Path) -> list[Path]:
    """The configs of the modules, relative to the folder, as far as they lie in it. Raises ModelLoadError for a
    modules.json that cannot be read."""
    modules, found = _read(folder / MODULES_FILE), []
    for module in modules if isinstance(modules, list) else []:
        path = str(module.get("path") or "") if isinstance(module, Mapping) else ""
        config = folder / path / "config.json"
        if path and config.is_file() and config.resolve().is_relative_to(folder.resolve()):
            found.append(config.relative_to(folder))
    return found


def _pooling_of(config: Any) -> PoolingKind | None:
    """None for a pooling that is not served: another one, or several side by side."""
    if config is None:
        return "mean"  # the default of sentence-transformers
    if not isinstance(config, Mapping):
        return None
    if (named := config.get("pooling_mode")) is not None:
        return _NAMED.get(str(named))
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if not modes:
        return "mean"
    return _KINDS.get(modes[0]) if len(modes) == 1 else None


def _read(file: Path) -> Any:
    """None if there is no such file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
