"""Reads generation_config.json: where a model stops, and how its makers recommend to sample from it. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from ...scheduler.sampling_params import SamplingParams
from .model_files import ModelLoadError

FILE = "generation_config.json"

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""The recommendations that are used: SGLang's five, and the limit that vLLM reads as well. ``do_sample`` is not looked
at, as there: a client that wants no sampling says ``temperature: 0``."""


def load_generation_config(folder: Path) -> dict[str, Any]:
    """The content of the file in a model's folder; {} if there is none. Raises ModelLoadError."""
    file = folder / FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # a UnicodeDecodeError is a ValueError, too
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


def load_sampling_defaults(folder: Path) -> dict[str, Any]:
    """The recommended sampling parameters in SGLang's names, those that the file gives. Raises ModelLoadError for a
    value that no request could have."""
    given = load_generation_config(folder)
    defaults = {name: given[name] for name in SAMPLING_NAMES if given.get(name) is not None}
    if defaults.get("top_k") == 0:
        del defaults["top_k"]  # transformers' way to say that there is no limit
    for name, value in defaults.items():
        try:
            msgspec.convert({name: value}, SamplingParams)
        except msgspec.ValidationError as error:
            raise ModelLoadError(
                f"{folder / FILE}: {name} is {value!r} ({error}); correct the file, or ignore what it recommends with "
                "--sampling-defaults openai"
            ) from None
    return defaults
