"""config.json and generation_config.json of the model in a GGUF file, from its metadata. No torch.

Metadata that would change what the model computes and are not understood are refused, never guessed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from .gguf_header import GGUFHeader
from .gguf_names import FAMILIES, LAYER, Family
from .load_errors import ModelLoadError

_SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>",
)  # fmt: skip
"""Control tokens that end a turn whatever the metadata say: releases of chat models name only one of theirs."""
_CONTROL = 3
_LARGEST_COUNT = 2**28
"""More layers, heads, positions or columns are an error of the file."""


class Metadata:
    """The values of one file, below its architecture's name."""

    def __init__(self, header: GGUFHeader) -> None:
        self.file = header.file
        self.values = header.metadata
        self.architecture = str(header.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ModelLoadError(
                f"{self.file} has no {self.architecture}.{key} in its metadata; convert the model again"
            )
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """A count: a whole number above 0, the same for all layers. Raises ModelLoadError."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelLoadError(
                    f"{self.file}: {self.architecture}.{key} differs from layer to layer ({value}), which is not served"
                )
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _LARGEST_COUNT:
            raise ModelLoadError(f"{self.file}: {self.architecture}.{key} is {value!r}, which is no sensible count")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """The shortest number that a float32 may have been written as: 1e-05, not 9.999999747378752e-06."""
        value = self.need(key) if default is None else self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelLoadError(f"{self.file}: {self.architecture}.{key} is {value!r}, which is no number")
        return _shortest(float(value))


def _shortest(value: float) -> float:
    single = struct.pack("<f", value)
    return next(
        (short for digits in range(1, 10) if struct.pack("<f", short := float(f"{value:.{digits}g}")) == single),
        value,
    )


def model_config(header: GGUFHeader, family: Family, rope_factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """config.json. rope_factors: the numbers of the tensors that `ROPE_TENSORS` names, where there are any."""
    given = Metadata(header)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{header.file} has no matrix token_embd.weight; is it a language model's file?")
    vocab_size, hidden_size = embedding.shape
    if hidden_size != given.number("embedding_length"):
        raise ModelLoadError(
            f"{header.file}: {given.architecture}.embedding_length is {given.number('embedding_length')}, but "
            f"token_embd.weight has {hidden_size} columns; the file is damaged"
        )
    heads = given.number("attention.head_count")
    head_dim = given.number("attention.key_length", max(hidden_size // heads, 1))
    if given.number("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{header.file}: keys and values of different lengths are not served")
    rotated = given.number("rope.dimension_count", head_dim)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "dtype": _dtype(header, embedding.block.name),
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": given.number("block_count"),
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": given.number("context_length"),
        "rms_norm_eps": given.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "rope_parameters": _rope(given, rope_factors, rotated, head_dim),
        **_special_ids(header),
    }
    if given.architecture != "lfm2":
        config["num_key_value_heads"] = given.number("attention.head_count_kv", heads)
    if not given.get("expert_count") or given.get("feed_forward_length"):
        config["intermediate_size"] = given.number("feed_forward_length")
    config |= _OWN.get(given.architecture, _nothing)(given, config)
    if given.get("expert_count") and given.architecture not in ("llama", "qwen2moe", "qwen3moe"):
        raise ModelLoadError(f"{header.file}: {given.architecture} with experts is not served as GGUF")
    if rotated != head_dim and family.architecture != "Phi3ForCausalLM":
        raise ModelLoadError(f"{header.file}: {rotated} of {head_dim} coordinates of a head are rotated; all must be")
    _check_shapes(header, config)
    return config


def _check_shapes(header: GGUFHeader, config: Mapping[str, Any]) -> None:
    """Raises ModelLoadError if the tensors of the layers are not of the sizes that the metadata declare: memory is
    taken by the latter."""
    hidden, head_dim, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    experts = config.get("num_experts") or config.get("num_local_experts")
    expert_inner = config.get("moe_intermediate_size", inner)
    wanted = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "attn_qkv": (queries + 2 * keys, hidden),
        "ffn_down": (hidden, inner),
        "ffn_down_exps": (experts, hidden, expert_inner),
        "ffn_gate_exps": (experts, expert_inner, hidden),
        "ffn_up_exps": (experts, expert_inner, hidden),
    }
    layers = set()
    for tensor in header.tensors.values():
        if (match := LAYER.fullmatch(tensor.name)) is None:
            continue
        layers.add(int(match[1]))
        if match[3] == "weight" and tensor.shape != wanted.get(match[2], tensor.shape):
            raise ModelLoadError(
                f"{header.file}: tensor {tensor.name} has shape {list(tensor.shape)}, the metadata ask for "
                f"{list(wanted[match[2]])}; the file is damaged"
            )
    if layers != set(range(config["num_hidden_layers"])):
        raise ModelLoadError(
            f"{header.file}: the metadata declare {config['num_hidden_layers']} layers, and the file holds "
            f"{len(layers)}; it is damaged"
        )


def _dtype(header: GGUFHeader, embedding: str) -> str:
    """The type to compute in, where it is free to choose."""
    if embedding == "F32":
        return "float32"
    is_gemma = str(header.metadata.get("general.architecture")).startswith("gemma")
    return "bfloat16" if embedding == "BF16" or is_gemma else "float16"  # Gemma's numbers leave float16


def _rope(given: Metadata, factors: Mapping[str, list[float]], rotated: int, head_dim: int) -> dict[str, Any]:
    theta = given.real("rope.freq_base", 10000.0)
    kind = str(given.get("rope.scaling.type") or "none")
    original = given.get("rope.scaling.original_context_length") or given.number("context_length")
    common = {"rope_theta": theta} | ({} if rotated == head_dim else {"partial_rotary_factor": rotated / head_dim})
    if factors:
        tables = {
            "long_factor": factors.get("rope_factors_long.weight") or factors.get("rope_freqs.weight"),
            "short_factor": factors.get("rope_factors_short.weight") or factors.get("rope_freqs.weight"),
        }
        if any(table is None or len(table) != rotated // 2 for table in tables.values()):
            raise ModelLoadError(f"{given.file}: rope factors must be {rotated // 2} numbers, for long and short texts")
        attention = given.real("rope.scaling.attn_factor", 1.0)
        return (
            common
            | tables
            | {
                "rope_type": "longrope",
                "attention_factor": attention,
                "original_max_position_embeddings": original,
            }
        )
    factor = given.get("rope.scaling.factor") or given.get("rope.scale_linear") or 1.0
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return common | {"rope_type": "default"}
    if kind == "linear":
        return common | {"rope_type": "linear", "factor": _shortest(factor)}
    if kind == "yarn":
        scaled = given.real("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0)
        return common | {
            "rope_type": "yarn",
            "factor": _shortest(factor),
            "original_max_position_embeddings": original,
            "attention_factor": scaled,
            "beta_fast": given.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": given.real("rope.scaling.yarn_beta_slow", 1.0),
        }
    raise ModelLoadError(f"{given.file}: rope.scaling.type {kind!r} is not supported; none, linear and yarn are")


def _nothing(given: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _llama(given: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if not given.get("expert_count"):
        return {}
    return {
        "num_local_experts": given.number("expert_count"),
        "num_experts_per_tok": given.number("expert_used_count"),
        "sliding_window": None,
    }


def _qwen_moe(given: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    size = given.number("expert_feed_forward_length")
    found = {
        "num_experts": given.number("expert_count"),
        "num_experts_per_tok": given.number("expert_used_count"),
        "moe_intermediate_size": size,
        "intermediate_size": config.get("intermediate_size", size),
        "norm_topk_prob": given.architecture == "qwen3moe",
        "decoder_sparse_step": 1,
    }
    if given.architecture == "qwen2moe":
        found["shared_expert_intermediate_size"] = given.number("expert_shared_feed_forward_length")
    return found


def _gemma(given: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(given: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    largest = config["num_hidden_layers"] == 46  # Gemma 2 27B alone scales by another size than the head's
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if largest
        else config["head_dim"],
        "sliding_window": given.number("attention.sliding_window"),
        "attn_logit_softcapping": given.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": given.real("final_logit_softcapping", 30.0),
    }


def _gemma3(given: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    largest = config["num_hidden_layers"] == 62  # as of Gemma 2
    local = {"rope_type": "default", "rope_theta": given.real("rope.freq_base_swa", 10000.0)}
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if largest
        else config["head_dim"],
        "sliding_window": given.number("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def _phi3(given: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    window = given.get("attention.sliding_window") or None
    return {
        "sliding_window": window,
        "original_max_position_embeddings": given.get(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


def _granite(given: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": given.real("embedding_scale", 1.0),
        "residual_multiplier": given.real("residual_scale", 1.0),
        "attention_multiplier": given.real("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": given.real("logit_scale", 1.0),
    }


def _lfm2(given: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without KV heads are convolutions."""
    by_layer = given.need("attention.head_count_kv")
    if not isinstance(by_layer, list) or len(by_layer) != config["num_hidden_layers"]:
        raise ModelLoadError(f"{given.file}: lfm2.attention.head_count_kv must have a number for each layer")
    kinds = ["full_attention" if heads else "conv" for heads in by_layer]
    if len(heads := {heads for heads in by_layer if heads}) != 1:
        raise ModelLoadError(f"{given.file}: layers with {sorted(heads)} KV heads are not served in one model")
    return {
        "num_key_value_heads": heads.pop(),
        "layer_types": kinds,
        "conv_L_cache": given.number("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
        "tie_embedding": config["tie_word_embeddings"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }


_OWN: dict[str, Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2moe": _qwen_moe,
    "qwen3moe": _qwen_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "lfm2": _lfm2,
}
"""What an architecture's config has beside the usual keys."""


def generation_config(header: GGUFHeader) -> dict[str, Any]:
    """generation_config.json: where a turn ends, and the sampling that the file recommends."""
    tokens = header.metadata.get("tokenizer.ggml.tokens") or []
    kinds = header.metadata.get("tokenizer.ggml.token_type") or []
    ends = [header.metadata.get(f"tokenizer.ggml.{key}") for key in _END_TOKENS]
    control = {token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL}
    ends += [control.get(text) for text in _END_TEXTS]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    for key, name in _SAMPLING.items():
        value = header.metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = value if isinstance(value, int) else _shortest(value)
    return found


def _special_ids(header: GGUFHeader) -> dict[str, Any]:
    return {
        key: header.metadata.get(f"tokenizer.ggml.{name}")
        for key, name in (
            ("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id"), ("pad_token_id", "padding_token_id")
        )
    }  # fmt: skip


def refuse_unknown_architecture(header: GGUFHeader) -> ModelLoadError:
    """The error for a file whose architecture is not read."""
    name = header.metadata.get("general.architecture", "missing")
    known = ", ".join(sorted(set(FAMILIES) - {"mixtral"}))
    return ModelLoadError(
        f"{header.file}: general.architecture {name!r} is not supported as GGUF; supported are {known}. Give the "
        "model's Hugging Face folder instead"
    )
