"""Reads ``quantization_config`` of config.json: which weights of a safetensors checkpoint are in few bits, and how the
files pack them. No torch.

What is not listed here is refused by its name: weights whose order of bits is guessed give wrong text, not an error.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .model_files import ModelLoadError

logger = logging.getLogger(__name__)

Packing = Literal["gptq", "awq", "packed", "int8", "float8", "mxfp4", "plain"]
"""How a module's weight is stored:

- gptq: qweight int32 [in / 8 or 4, out], qzeros, scales [in / group, out], g_idx
- awq: qweight int32 [in, out / 8], eight outputs interleaved, qzeros, scales [in / group, out]
- packed (compressed-tensors): weight_packed int32 [out, in / 8 or 4], weight_scale, weight_zero_point, weight_shape
- int8 (compressed-tensors): weight int8 [out, in], weight_scale, weight_zero_point
- float8: weight [out, in] of 8-bit floats, and a scale per tensor, output or block: weight_scale, weight_scale_inv
- mxfp4 (gpt-oss): of all experts of a layer, NAME_blocks uint8 [experts, out, in / 32, 16], NAME_scales uint8
- plain (Baton's own, by `baton convert`): weight_codes uint8 [out, in or in / 2], weight_rows float32 [out],
  weight_scales and weight_mins float16 [out, in / 32], see QuantizedWeight
"""

OWN_METHOD, OWN_FORMAT = "baton", 1
"""Folders that `baton convert --quantization` writes."""
PLAIN_GROUP = 32
"""Inputs that share a scale in them."""

READ = "GPTQ and AWQ (4 bits; GPTQ also 8), compressed-tensors (W4A16, W8A16, W8A8, FP8), fp8, mxfp4, and GGUF files"
"""The formats that are read, for error messages."""

_COMPRESSED_FORMATS: dict[str, Packing] = {
    "pack-quantized": "packed",
    "int-quantized": "int8",
    "naive-quantized": "int8",
    "float-quantized": "float8",
}


@dataclass(frozen=True, slots=True)
class PackingSettings:
    """How the weights of some modules are packed."""

    packing: Packing
    bits: Literal[4, 8]
    group: int = 0
    """Inputs that share a scale; 0: all of an output."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, of 8-bit floats in blocks."""
    zeros_plus_one: bool = False
    """GPTQ's first format stores each zero point less one."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """``quantization_config``, as far as it decides how files are read."""

    method: str
    groups: tuple[tuple[tuple[str, ...], PackingSettings], ...]
    """Targets of modules -> how their weights are packed: names, ``re:`` and a pattern, or the name of a class."""

    def settings(self, module: str) -> PackingSettings | None:
        """Those of a module by its name; None if no target names it or all modules."""
        for targets, settings in self.groups:
            for target in targets:
                if target == module or (target.startswith("re:") and re.match(target[3:], module)):
                    return settings
        for targets, settings in self.groups:
            if any(target.isidentifier() and target[0].isupper() for target in targets):  # a class, such as Linear
                return settings
        return None


def read_quantization(folder: Path) -> Quantization | None:
    """That of the folder's config.json, or of a file of its own, as older tools wrote it; None if its weights are
    plain. Raises ModelLoadError."""
    found = parse_quantization(_read_object(folder / "config.json"), str(folder / "config.json"))
    for name, method in _OWN_FILES.items():
        if found is None and (given := _read_object(folder / name)):
            found = parse_quantization({"quantization_config": {"quant_method": method} | given}, str(folder / name))
    return found


_OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def _read_object(file: Path) -> dict[str, Any]:
    """{} without such a file; `load_model_config` complains of a config.json that is broken."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def parse_quantization(raw: Mapping[str, Any], source: str) -> Quantization | None:
    """raw: a parsed config.json, which errors call ``source``. Raises ModelLoadError for a format that is not read."""
    given = next(
        (
            part["quantization_config"]
            for part in (raw, raw.get("text_config"), raw.get("llm_config"), raw.get("language_config"))
            if isinstance(part, Mapping) and part.get("quantization_config")
        ),
        None,
    )
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping) or not isinstance(method, str) or method not in _PARSERS:
        named = method or ("bitsandbytes" if "load_in_4bit" in given or "load_in_8bit" in given else "unknown")
        raise ModelLoadError(
            f"{source}: quantised weights ({named}) are not supported; supported are {READ}. Use another release of "
            "the model: one of these, or the bf16, f16 or f32 checkpoint"
        )
    try:
        groups = _PARSERS[method](given, source)
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{source}: quantization_config ({method}) cannot be understood: {error!r}") from error
    return Quantization(method, groups)


_Groups = tuple[tuple[tuple[str, ...], PackingSettings], ...]
_ALL = ("Linear",)


def _parse_gptq(given: Mapping[str, Any], source: str) -> _Groups:
    bits, group = int(given["bits"]), int(given.get("group_size", 128))
    form = str(given.get("checkpoint_format") or "gptq")
    if bits not in (4, 8):
        raise _refusal(source, f"GPTQ of {bits} bits is not supported; 4 and 8 bits are")
    if form not in ("gptq", "gptq_v2"):
        raise _refusal(source, f"GPTQ's checkpoint_format {form!r} is not supported; gptq and gptq_v2 are")
    if given.get("desc_act") and group > 0:
        raise _refusal(
            source,
            "GPTQ with desc_act (act-order: inputs are assigned to groups in an order of their own) is not supported; "
            "take a release that was quantised with desc_act false",
        )
    if given.get("dynamic"):
        raise _refusal(source, "GPTQ with settings by module (dynamic) is not supported")
    return ((_ALL, PackingSettings("gptq", _bits(bits), max(group, 0), zeros_plus_one=form == "gptq")),)


def _parse_awq(given: Mapping[str, Any], source: str) -> _Groups:
    bits = int(given["bits"] if "bits" in given else given["w_bit"])
    group = int(given["group_size"] if "group_size" in given else given["q_group_size"])
    version = str(given.get("version") or "gemm").lower()
    if bits != 4:
        raise _refusal(source, f"AWQ of {bits} bits is not supported; 4 bits are")
    if version != "gemm":
        raise _refusal(source, f"AWQ's version {version!r} packs its weights in another order; gemm is supported")
    return ((_ALL, PackingSettings("awq", 4, max(group, 0))),)


def _parse_compressed(given: Mapping[str, Any], source: str) -> _Groups:
    if given.get("sparsity_config") and (given["sparsity_config"].get("format") or "dense") != "dense":
        raise _refusal(source, f"sparse weights ({given['sparsity_config']['format']}) are not supported")
    if given.get("kv_cache_scheme"):
        logger.info("%s: kv_cache_scheme is ignored: the KV cache is of the type that the server is asked for", source)
    groups = []
    for name, group in given["config_groups"].items():
        weights = group.get("weights")
        form = str(group.get("format") or given.get("format"))
        if weights is None:
            continue
        if form not in _COMPRESSED_FORMATS:
            supported = ", ".join(_COMPRESSED_FORMATS)
            raise _refusal(source, f"compressed-tensors' format {form!r} ({name}) is not supported; {supported} are")
        bits, kind, strategy = int(weights["num_bits"]), str(weights.get("type", "int")), weights.get("strategy")
        packing = _COMPRESSED_FORMATS[form]
        if kind != ("float" if packing == "float8" else "int") or bits not in ((4, 8) if packing == "packed" else (8,)):
            raise _refusal(source, f"compressed-tensors' {form} with weights of {bits} bits ({kind}) is not supported")
        if strategy not in (None, "tensor", "channel", "group", "block"):
            raise _refusal(source, f"compressed-tensors' strategy {strategy!r} of weights is not supported")
        if weights.get("actorder") not in (None, False, "static", "weight"):
            raise _refusal(
                source,
                f"compressed-tensors' actorder {weights['actorder']!r} (inputs are assigned to groups in an order of "
                "their own) is not supported; take a release without act-order, or with actorder static",
            )
        size = weights.get("group_size") if strategy in (None, "group") else None
        block = _block(weights.get("block_structure")) if strategy == "block" else None
        settings = PackingSettings(packing, _bits(bits), max(int(size or 0), 0), block)
        groups.append((tuple(map(str, group["targets"])), settings))
    return tuple(groups)


def _parse_fp8(given: Mapping[str, Any], source: str) -> _Groups:
    if (kind := given.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(source, f"fp8 weights of the kind {kind!r} are not supported; e4m3 is")
    return ((_ALL, PackingSettings("float8", 8, block=_block(given.get("weight_block_size")))),)


def _parse_mxfp4(given: Mapping[str, Any], source: str) -> _Groups:
    return ((_ALL, PackingSettings("mxfp4", 4, 32)),)


def _parse_own(given: Mapping[str, Any], source: str) -> _Groups:
    if given.get("format") != OWN_FORMAT:
        raise _refusal(
            source,
            f"weights in few bits of format {given.get('format')!r} of `baton convert` are not supported; format "
            f"{OWN_FORMAT} is: convert the model again",
        )
    return ((_ALL, PackingSettings("plain", 8, PLAIN_GROUP)),)


_PARSERS = {
    OWN_METHOD: _parse_own,
    "gptq": _parse_gptq,
    "awq": _parse_awq,
    "compressed-tensors": _parse_compressed,
    "fp8": _parse_fp8,
    "mxfp4": _parse_mxfp4,
}


def _block(sizes: Any) -> tuple[int, int] | None:
    if sizes is None:
        return None
    out, into = map(int, sizes)
    if min(out, into) < 1:
        raise ValueError(f"blocks of {out} outputs and {into} inputs")
    return out, into


def _bits(bits: int) -> Literal[4, 8]:
    return 4 if bits == 4 else 8


def _refusal(source: str, text: str) -> ModelLoadError:
    return ModelLoadError(f"{source}: {text}")
