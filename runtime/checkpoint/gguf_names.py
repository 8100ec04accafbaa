"""The architectures of GGUF files that are read, and the names that their tensors have in a Hugging Face checkpoint. No
torch.

To add an architecture that `runtime/models` computes, add its entry to `FAMILIES`, and what its config needs to
`gguf_config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .gguf_header import GGUFHeader

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_USUAL = _ATTENTION | _MLP | _BEFORE
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


@dataclass(frozen=True, slots=True)
class Family:
    """How the tensors of an architecture are stored. ``{}`` in a name stands for the number of an expert."""

    architecture: str
    """In Hugging Face's config.json."""
    layer: Mapping[str, str] = field(default_factory=lambda: _USUAL)
    """Name in a layer -> below model.layers.N."""
    outside: Mapping[str, str] = field(default_factory=lambda: _OUTSIDE)
    permutes: bool = False
    """True if the outputs of q and k are in llama.cpp's order: the two coordinates that a rotation turns lie side by
    side, where Hugging Face's models have them half a head apart."""
    norm_offset: float = 0.0
    """What the file has added to the weights of norms."""


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", permutes=True),
    "mixtral": Family("MixtralForCausalLM", _ATTENTION | _BEFORE | _MIXTRAL, permutes=True),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen2moe": Family("Qwen2MoeForCausalLM", _USUAL | _EXPERTS | _SHARED_EXPERT),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3moe": Family("Qwen3MoeForCausalLM", _USUAL | _EXPERTS),
    "gemma": Family("GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Family(
        "Gemma2ForCausalLM", _USUAL | _BEHIND | {"ffn_norm": "pre_feedforward_layernorm"}, norm_offset=1.0
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM", _USUAL | _BEHIND | {"ffn_norm": "pre_feedforward_layernorm"}, norm_offset=1.0
    ),
    "phi3": Family("Phi3ForCausalLM", _USUAL | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "olmo2": Family("Olmo2ForCausalLM", _ATTENTION | _MLP | _BEHIND),
    "granite": Family("GraniteForCausalLM", permutes=True),
    "smollm3": Family("SmolLM3ForCausalLM", permutes=True),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        _ATTENTION
        | {
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
    ),
}
"""By general.architecture; ``mixtral`` stands for a llama with experts."""

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong into the config."""

LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
"""Name of a tensor in a layer: the layer's number, the name below it, and the part."""


def family_of(header: GGUFHeader) -> Family | None:
    """None for an architecture that is not read."""
    name = header.metadata.get("general.architecture")
    if name == "llama" and header.metadata.get("llama.expert_count"):
        name = "mixtral"
    return FAMILIES.get(str(name))


def checkpoint_name(name: str, family: Family) -> str:
    """The name of a tensor in a checkpoint, with ``{}`` for the number of an expert; the same if it is not known.

    >>> checkpoint_name("blk.3.attn_q.weight", FAMILIES["llama"])
    'model.layers.3.self_attn.q_proj.weight'
    """
    if match := LAYER.fullmatch(name):
        if match[2] in family.layer:
            return f"model.layers.{match[1]}.{family.layer[match[2]]}.{match[3]}"
        return name
    stem, _, part = name.rpartition(".")
    return f"{family.outside[stem]}.{part}" if stem in family.outside else name
