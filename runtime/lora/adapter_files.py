"""Reads a LoRA adapter as peft saves it: adapter_config.json and adapter_model.safetensors. Nothing is unpickled.

    {"peft_type": "LORA", "r": 8, "lora_alpha": 16, …}
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, rank]

Anything else that changes the base model is refused by name: without it, the adapter would silently give wrong answers.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import re2
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ..checkpoint.model_files import ModelLoadError
from ..checkpoint.tensor_names import text_tensor_name
from ..checkpoint.weight_files import read_header, shorten
from .adapter_config import CONFIG_FILE, MERGE, AdapterError, is_number, read_adapter_config, shown

WEIGHTS_FILE, PICKLED_FILE = "adapter_model.safetensors", "adapter_model.bin"

_DTYPES = torch.float32, torch.float16, torch.bfloat16, torch.float64
_FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.[^.]+)?\.weight")


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """The update of one linear layer: W + B A."""

    a: torch.Tensor
    """[rank, in]"""
    b: torch.Tensor
    """float32 [out, rank], scaled."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter as it was read."""

    digest: str
    """Digest of its contents. Adapters with equal digests compute the same."""
    factors: dict[str, LowRankFactors]
    """By the module's name in a checkpoint of the text model, such as model.layers.0.self_attn.q_proj."""

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(len(factors.a) for factors in self.factors.values())


def read_adapter(folder: str | Path) -> AdapterFile:
    """Read an adapter's folder. Raises AdapterError."""
    folder = Path(folder)
    config, content = read_adapter_config(folder)
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        pickled = " (adapter_model.bin is pickled, and not read: save it again with safe_serialization=True)"
        raise AdapterError(f"{folder} has no {WEIGHTS_FILE}{pickled if (folder / PICKLED_FILE).exists() else ''}")
    try:
        read_header(file)  # first: a file that is something else may be of any size
        weights = file.read_bytes()  # not mapped: a file that is saved again meanwhile would end the process
        tensors = load(weights)
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise AdapterError(f"{file} cannot be read: {error}; download or save it again") from error
    digest = hashlib.blake2b(content, digest_size=16)
    digest.update(weights)
    factors = _pair_factors(tensors, config, file)
    return AdapterFile(digest.hexdigest(), factors)


def _pair_factors(tensors: dict[str, torch.Tensor], config: Mapping[str, Any], file: Path) -> dict[str, LowRankFactors]:
    found: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    """Module of the text model -> A or B -> (the module's name in the file, the tensor)."""
    others = []
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        text_name = text_tensor_name(f"{match[1]}.weight") if match is not None else None
        if match is None or text_name is None:
            others.append(name)
            continue
        pair = found.setdefault(text_name.removesuffix(".weight"), {})
        if match[2] in pair:
            raise AdapterError(f"{file} holds lora_{match[2]} of {match[1]} twice; save the adapter again")
        pair[match[2]] = match[1], tensor
    if others:
        raise AdapterError(f"{file} holds tensors that are no update of a linear layer: {shorten(others)}; {MERGE}")
    if not found:
        raise AdapterError(f"{file} holds no tensor")
    factors = {}
    for module, pair in found.items():
        if missing := {"A", "B"} - pair.keys():
            raise AdapterError(f"{file} lacks lora_{missing.pop()} of {module}; save the adapter again")
        (own_name, a), (_, b) = pair["A"], pair["B"]
        factors[module] = _scaled(own_name, a, b, config, file)
    return factors


def _scaled(module: str, a: torch.Tensor, b: torch.Tensor, config: Mapping[str, Any], file: Path) -> LowRankFactors:
    """module: its name in the file, which the patterns of the config are written for."""
    for name, factor in (("lora_A", a), ("lora_B", b)):
        if factor.dim() != 2 or factor.dtype not in _DTYPES:
            raise AdapterError(
                f"{file}: {name} of {module} is {factor.dtype} {list(factor.shape)}; it is no matrix of floats"
            )
        if not factor.isfinite().all():
            raise AdapterError(f"{file}: {name} of {module} holds numbers that are not finite")
    if len(a) != b.shape[1] or not len(a):
        raise AdapterError(
            f"{file}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; the rank of both must be the same"
        )
    alpha, rank = _alpha(module, config, file), len(a)
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return LowRankFactors(a, b.float() * scale)


def _alpha(module: str, config: Mapping[str, Any], file: Path) -> float:
    """peft: the first pattern that matches the end of the module's name, at a dot."""
    for pattern, alpha in (config.get("alpha_pattern") or {}).items():
        if not is_number(alpha):
            raise AdapterError(f"{file.with_name(CONFIG_FILE)}: alpha_pattern[{pattern!r}] is {shown(alpha)}")
        try:
            if re2.fullmatch(rf"(.*\.)?({pattern})", module):  # linear time for every pattern
                return float(alpha)
        except re2.error as error:
            raise AdapterError(
                f"{file.with_name(CONFIG_FILE)}: alpha_pattern[{shown(pattern)}] is no pattern: {error}"
            ) from None
    return float(config["lora_alpha"])
