"""Reads a LoRA adapter's config in peft's format, and refuses adapters that do more than LoRA. No torch: adapters are
checked before processes start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.model_files import ModelLoadError

CONFIG_FILE = "adapter_config.json"

_MAX_CONFIG_BYTES = 1 << 20
_LARGEST = 1e38

MERGE = "merge it into the weights with peft's merge_and_unload, and serve those"


class AdapterError(ModelLoadError):
    """An adapter that cannot be served; the message says why and what to change."""


def read_adapter_config(folder: Path) -> tuple[dict[str, Any], bytes]:
    """The config, and the file's bytes. Raises AdapterError, also for a config that changes the model in another way
    than by low-rank updates."""
    file = folder / CONFIG_FILE
    try:
        is_folder = folder.is_dir()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise AdapterError(f"{shown(str(folder))} cannot be looked at: {shown(str(error))}") from error
    if not is_folder:
        raise AdapterError(f"{folder} is no folder on this machine; give the folder of an adapter, as peft saves it")
    if file.exists() and not file.is_file():  # reading a pipe would wait for its writer
        raise AdapterError(f"{file} is no regular file")
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise AdapterError(
            f"{file} cannot be read: {error.strerror or error}; give the folder of an adapter, as peft saves it"
        ) from error
    if len(content) > _MAX_CONFIG_BYTES:
        raise AdapterError(f"{file} is larger than {_MAX_CONFIG_BYTES} bytes; it is no adapter's config")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{file} holds no JSON object")
    if refused := _refused_settings(config):
        raise AdapterError(f"{file}: {refused}")
    return config, content


_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that take a part of the base model's weights into the adapter."""

_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "use_dora": (bool, f"DoRA also scales the columns of the weights; {MERGE}"),
    "modules_to_save": (bool, f"it replaces whole modules; {MERGE}"),
    "trainable_token_indices": (bool, f"it changes rows of the embedding; {MERGE}"),
    "target_parameters": (bool, f"it changes weights that belong to no linear layer, such as experts'; {MERGE}"),
    "bias": (lambda value: value not in (None, "none"), f"it changes biases; {MERGE}"),
    "lora_bias": (bool, f"it adds biases; {MERGE}"),
    "fan_in_fan_out": (bool, "its weights are transposed, as those of GPT-2's Conv1D, which no model here has"),
    "layer_replication": (bool, f"it repeats layers of the base model; {MERGE}"),
    "alora_invocation_tokens": (bool, "an activated adapter begins within a prompt, which is not supported"),
    "use_qalora": (bool, f"QA-LoRA pools the inputs of a layer; {MERGE}"),
    "arrow_config": (bool, "it routes tokens to several adapters, which is not supported"),
    "kasa_config": (bool, f"KaSA leaves out a part of the base model's weights; {MERGE}"),
    "monteclora_config": (bool, "its factors are drawn at random, which is not supported"),
    "use_bdlora": (bool, f"its factors are block-diagonal; {MERGE}"),
    "init_lora_weights": (
        lambda value: isinstance(value, str) and value.lower().startswith(_CHANGES_BASE),
        "the base model was changed when it was made; save it with path_initial_model_for_weight_conversion, which "
        "makes it a plain adapter",
    ),
}
"""Settings that change what is computed: (which values do, why and what to do instead)."""


def _refused_settings(config: Mapping[str, Any]) -> str | None:
    if config.get("peft_type") != "LORA":
        return f"peft_type is {shown(config.get('peft_type'))}; only LORA is served"
    for name, (changes, instead) in _REFUSED.items():
        if changes(config.get(name)):
            return f"{name} is {shown(config[name])}: {instead}"
    for name in ("r", "lora_alpha"):
        value: Any = config.get(name)
        if not is_number(value) or value <= 0:
            return f"{name} is {shown(value)}; it is a positive number"
    if not isinstance(config.get("alpha_pattern") or {}, dict):
        return f"alpha_pattern is {shown(config['alpha_pattern'])}; it is an object"
    return None


def is_number(value: Any) -> bool:
    """True for a number of JSON that float32 can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def shown(value: Any) -> str:
    """A value for an error message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
