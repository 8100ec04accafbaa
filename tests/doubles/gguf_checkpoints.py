"""Writes Hugging Face folders as GGUF files, as llama.cpp's converter does, with the package gguf: its writer, its
table of tensor names, its quantisation. Nothing is shared with Baton's reader."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.doubles import k_quants

Kinds = Callable[[str, tuple[int, ...]], gguf.GGMLQuantizationType]
"""Name of a tensor in the file and its shape -> type."""

PERMUTED = ("llama", "granite", "smollm3")
"""Architectures whose rotation turns neighbours."""

FLOATS: Kinds = lambda name, shape: gguf.GGMLQuantizationType.F32  # noqa: E731


def write_gguf(
    folder: Path,
    file: Path,
    architecture: str,
    *,
    kinds: Kinds = FLOATS,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """Write the model in ``folder``. metadata: values by key; None leaves one out. extra: tensors by name.

    Returns the numbers that the file stands for, by the names of the folder."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for part in folder.glob("*.safetensors"):
        tensors |= load_file(part)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    values = config_metadata(config, architecture) | placeholder_tokens(config["vocab_size"]) | dict(metadata or {})
    if architecture == "lfm2":
        values["lfm2.feed_forward_length"] = len(tensors["model.layers.0.feed_forward.w1.weight"])
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in values.items():
        if value is not None:
            add_value(writer, key, value)
    kept: dict[str, torch.Tensor] = {}
    for name, numbers in _as_converted(tensors, config, architecture).items():
        kind = kinds(name, numbers.shape)
        numbers = np.ascontiguousarray(numbers, dtype=np.float32)
        data = (
            k_quants.quantise(numbers, kind.name) if kind.name.endswith("_K") else gguf.quants.quantize(numbers, kind)
        )
        writer.add_tensor(name, data, raw_dtype=kind)
        kept[name] = torch.from_numpy(gguf.quants.dequantize(data, kind).reshape(numbers.shape).copy())
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    finish(writer)
    return _undone(kept, tensors, config, architecture)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        of = {str: kinds.STRING, int: kinds.INT32, float: kinds.FLOAT32}[type(value[0])]
        writer.add_key_value(key, value, kinds.ARRAY, of)
        return
    of = {str: kinds.STRING, bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32}[type(value)]
    writer.add_key_value(key, value, of)


def placeholder_tokens(count: int) -> dict[str, Any]:
    """A tokenizer of the right size, which models of random weights do not need."""
    tokens = [chr(code) for code in range(0x100, 0x100 + count - 1)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, tokens[0] + tokens[1]],
        "tokenizer.ggml.token_type": [1] * count,
        "tokenizer.ggml.merges": [f"{tokens[0]} {tokens[1]}"],
    }


def config_metadata(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or hidden // heads
    given: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", config.get("norm_eps")),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 1e4),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": config["vocab_size"],
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "attention.sliding_window": config.get("sliding_window"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "attention.scale": config.get("attention_multiplier"),
        "logit_scale": config.get("logits_scaling"),
    }
    if local is not None:
        given["rope.freq_base_swa"] = float(local["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        given |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") in ("yarn", "longrope"):
        given["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        if "attention_factor" in rope and rope["rope_type"] == "longrope":
            given["rope.scaling.attn_factor"] = float(rope["attention_factor"])
    if architecture == "lfm2":
        kinds = config["layer_types"]
        given["attention.head_count_kv"] = [config["num_key_value_heads"] * (kind != "conv") for kind in kinds]
        given["shortconv.l_cache"] = config["conv_L_cache"]
    return {f"{architecture}.{key}": value for key, value in given.items()}


def _as_converted(
    tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], architecture: str
) -> dict[str, np.ndarray]:
    """By their names in the file. Those of experts become one."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: _sort_key(item[0])):
        stem, expert = _without_expert(name)
        numbers = _changed(name, tensor.float(), config, architecture).numpy()
        if expert is None:
            found[their_name(name, config, architecture)] = numbers
        else:
            experts.setdefault(their_name(stem, config, architecture), []).append(numbers)
    return found | {name: np.stack(each) for name, each in experts.items()}


def _sort_key(name: str) -> tuple[str, int]:
    stem, expert = _without_expert(name)
    return stem, expert or 0


def _without_expert(name: str) -> tuple[str, int | None]:
    parts = name.split(".")
    if "experts" not in parts or not parts[parts.index("experts") + 1].isdigit():
        return name, None
    place = parts.index("experts") + 1
    return ".".join(parts[:place] + parts[place + 1 :]), int(parts[place])


def their_name(name: str, config: Mapping[str, Any], architecture: str) -> str:
    table = gguf.get_tensor_name_map(
        next(kind for kind, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture), config["num_hidden_layers"]
    )
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _heads(name: str, config: Mapping[str, Any]) -> int:
    return config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]


def _is_permuted(name: str, architecture: str) -> bool:
    return architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name)


def _changed(name: str, tensor: torch.Tensor, config: Mapping[str, Any], architecture: str) -> torch.Tensor:
    if _is_permuted(name, architecture):
        heads = _heads(name, config)
        split = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return split.swapaxes(1, 2).reshape(tensor.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor.squeeze(1) if ".conv.conv." in name and name.endswith("weight") else tensor


def _undone(
    kept: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], architecture: str
) -> dict[str, torch.Tensor]:
    """By the names of the folder."""
    found = {}
    for name, tensor in tensors.items():
        stem, expert = _without_expert(name)
        numbers = kept[their_name(stem, config, architecture)]
        numbers = numbers if expert is None else numbers[expert]
        if _is_permuted(name, architecture):
            heads = _heads(name, config)
            split = numbers.reshape(heads, len(numbers) // heads // 2, 2, *numbers.shape[1:])
            numbers = split.swapaxes(1, 2).reshape(tensor.shape)
        elif architecture.startswith("gemma") and name.endswith("norm.weight"):
            numbers = numbers - 1
        found[name] = numbers.reshape(tensor.shape)
    return found


def save_folder(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """A Hugging Face folder without a tokenizer."""
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(config)))
