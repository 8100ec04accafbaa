"""The text part of a multimodal model's config.json, as the config of the decoder that computes it. No torch.

    {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {…}, "vision_config": {…}}
        ──▶ {"architectures": ["Gemma3ForCausalLM"], …}

`tensor_names` maps the names of its tensors. The rotary embeddings of the Qwen-VL family (mrope) give a picture's
tokens three positions each; those of text are equal, so that its rotary embedding is the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OTHER_PARTS = ("vision_config", "audio_config", "vision_tower_config", "vit_config")
"""Keys of the config that a text model does not have."""

DECODERS = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""model_type of a text part -> architecture of the same decoder alone. To add one, check that it computes the same."""

FLAT = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""model_type of models whose older files have the text part's keys beside vision_config -> that of the part."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-06, "sliding_window": 4096, "query_pre_attn_scalar": 256,
    },
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-06,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-06, "sliding_window": 4096,
    },
}  # fmt: skip
"""What transformers assumes of keys that older text_configs leave out (Gemma 3, LLaVA); a test compares the two."""

_SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")
"""Keys that may stand at the top for the text part."""


def text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of the text decoder alone; None for a model of text, and for a text part that `DECODERS` lacks.

    >>> text = {"model_type": "llama", "hidden_size": 64}
    >>> text_part({"architectures": ["LlavaForConditionalGeneration"], "text_config": text})["architectures"]
    ['LlamaForCausalLM']
    """
    given = _text_config(config)
    if given is None:
        return None
    decoder = DECODERS.get(str(given.get("model_type")))
    if decoder is None:
        return None
    found = DEFAULTS.get(given["model_type"], {}) | given
    found |= {key: config[key] for key in _SHARED if found.get(key) is None and config.get(key) is not None}
    if config.get("tie_word_embeddings") is not None:  # the head is of the whole model
        found["tie_word_embeddings"] = config["tie_word_embeddings"]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := found.get(key), Mapping) and "mrope_section" in rope:
            kind = rope.get("rope_type") or rope.get("type")
            found[key] = {**rope, "type": None, "rope_type": "default" if kind in ("mrope", None) else kind}
    return found | {"architectures": [decoder]}


def multimodal_name(config: Mapping[str, Any]) -> str | None:
    """The architecture of a model that takes more than text; None for others."""
    if not any(isinstance(config.get(key), Mapping) for key in OTHER_PARTS):
        return None
    return next(iter(config.get("architectures") or ()), None) or str(config.get("model_type", "a multimodal model"))


def _text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(key), Mapping):
            return dict(config[key])
    model_type = config.get("model_type")
    if model_type in FLAT and multimodal_name(config):
        rest = {key: value for key, value in config.items() if key not in OTHER_PARTS}
        return rest | {"model_type": FLAT[model_type]}
    return None
