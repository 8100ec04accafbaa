"""Tiny random float32 models of every supported architecture, made with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TINY = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # logits with real margins
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 512,
}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 20,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 6,
}
GROUPED_EXPERTS = EXPERTS | {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
SHARP_YARN = YARN | {"factor": 8.0, "mscale": 0.9, "mscale_all_dim": 0.7}
# Where layers are sharper, the reference's own logits differ by more than the tolerance from chunk size to chunk size.
DELTA_NET = {
    "initializer_range": 0.12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 12,
}
MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_chunk_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, odd head_dim": ("Llama", {"tie_word_embeddings": True, "head_dim": 14}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama, one KV head": ("Llama", {"num_key_value_heads": 1}),
    "mistral, no window": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "mistral, window": ("Mistral", {"sliding_window": 20, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "llama, yarn of DeepSeek": (
        "Llama",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 16}},
    ),
    "llama, dynamic rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            },
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
            "mlp_bias": True,
        },
    ),
    "phi3": ("Phi3", {}),
    "phi4, longrope of a part": (
        "Phi3",
        {
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5, "attention_factor": 1.2},
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": 30,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 20}),
    "ministral": ("Ministral", {"head_dim": 8, "sliding_window": 20}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 8,
            "rope_parameters": YARN
            | {
                "original_max_position_embeddings": 40,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "exaone4": ("Exaone4", {"head_dim": 8, "sliding_window": 20, "sliding_window_pattern": 2}),
    "exaone4, no window": ("Exaone4", {"head_dim": 8, "sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "seed_oss": ("SeedOss", {"head_dim": 8, "attention_out_bias": True}),
    "ernie": ("Ernie4_5", {"head_dim": 8, "use_bias": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        EXPERTS | {"head_dim": 8, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        EXPERTS | {"num_experts": 6, "shared_expert_intermediate_size": 40, "sliding_window": None},
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}),
    "granitemoe": (
        "GraniteMoe",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
    ),
    "glm4_moe": (
        "Glm4Moe",
        EXPERTS
        | {
            "head_dim": 8,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "n_shared_experts": 2,
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "attention_chunk_size": 24,
            "no_rope_layers": [1, 0, 1, 1],
            "floor_scale": 30,
            "attn_scale": 0.3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "intermediate_size_mlp": 80,
            "moe_layers": [1, 2],
            "rope_parameters": LLAMA3_ROPE,
            "attention_bias": True,
        },
    ),
    "llama4, no norm": (
        "Llama4Text",
        {
            "head_dim": 8,
            "attention_chunk_size": 64,
            "no_rope_layer_interval": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 24,
            "intermediate_size_mlp": 80,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        LATENT | GROUPED_EXPERTS | {"topk_method": "group_limited_greedy", "rope_parameters": SHARP_YARN},
    ),
    "deepseek_v2_lite": ("DeepseekV2", LATENT | GROUPED_EXPERTS | {"q_lora_rank": None, "attention_bias": True}),
    "deepseek_v3": ("DeepseekV3", LATENT | GROUPED_EXPERTS | {"rope_parameters": SHARP_YARN, "attention_bias": True}),
    "kimi_k2": ("DeepseekV3", LATENT | GROUPED_EXPERTS | {"n_group": 1, "topk_group": 1, "qk_rope_head_dim": 12}),
    "deepseek_v3, halves": ("DeepseekV3", LATENT | GROUPED_EXPERTS | {"rope_interleave": False}),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | GROUPED_EXPERTS | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "mistral4": (
        "Mistral4",
        LATENT
        | GROUPED_EXPERTS
        | {
            "rope_parameters": SHARP_YARN
            | {"original_max_position_embeddings": 40, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 8 / 18}
        },
    ),
    "minicpm3": (
        "MiniCPM3",
        LATENT
        | {"scale_emb": 3, "scale_depth": 0.9, "dim_model_base": 16, "v_head_dim": None}
        | {"rope_parameters": LONGROPE | {"attention_factor": 1.1}},
    ),
    "youtu": ("Youtu", LATENT | {"tie_word_embeddings": True}),
    "ernie_moe": (
        "Ernie4_5_Moe",
        {"moe_k": 2, "moe_num_experts": 6, "moe_num_shared_experts": 2, "moe_intermediate_size": 24, "head_dim": 8},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 20,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "lfm2, biases": ("Lfm2", {"full_attn_idxs": [0], "conv_bias": True, "conv_L_cache": 4}),
    "lfm2_moe": (
        "Lfm2Moe",
        EXPERTS | {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 6},
    ),
    "qwen3_next": (
        "Qwen3Next",
        EXPERTS
        | DELTA_NET
        | {"head_dim": 16, "num_experts": 6, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3_5": ("Qwen3_5Text", DELTA_NET | {"head_dim": 16, "attention_bias": True}),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        EXPERTS | DELTA_NET | {"head_dim": 16, "num_experts": 8, "shared_expert_intermediate_size": 40},
    ),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        MAMBA
        | {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "residual_multiplier": 0.4,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
        },
    ),
    "granite_hybrid, experts, rope": (
        "GraniteMoeHybrid",
        MAMBA
        | {
            "layer_types": ["attention", "mamba", "mamba"],
            "position_embedding_type": "rope",
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 40,
        },
    ),
    "bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1], "mamba_proj_bias": True}),
    "falcon_h1": (
        "FalconH1",
        MAMBA
        | {
            "mamba_d_ssm": 96,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.5],
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.6,
            "key_multiplier": 0.5,
            "mlp_multipliers": [0.8, 1.4],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
        },
    ),
    "falcon_h1, norm, biases": (
        "FalconH1",
        MAMBA
        | {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_rms_norm": True,
            "projectors_bias": True,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "falcon_h1, gate first": (
        "FalconH1",
        MAMBA | {"mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 24,
            "head_dim": 10,
        },
    ),
    "mamba2": ("Mamba2", {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 24, "chunk_size": 16}),
    "qwen3, bias, tied": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
}


LINEAR_OR_FULL = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CONV_OR_FULL = {"layer_types": ["conv", "full_attention", "conv"]}
GATED_DELTA = LINEAR_OR_FULL | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 8,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 10,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
STATEFUL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", "", GATED_DELTA | FEW_EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3_5": ("Qwen3_5Text", "Qwen3_5ForCausalLM", GATED_DELTA),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        "Qwen3_5MoeForCausalLM",
        GATED_DELTA | FEW_EXPERTS | {"shared_expert_intermediate_size": 24},
    ),
    "olmo_hybrid": ("OlmoHybrid", "", GATED_DELTA | {"linear_num_key_heads": 4}),
    "kimi_linear": (
        "KimiLinear",
        "",
        LINEAR_OR_FULL
        | FEW_EXPERTS
        | {
            "linear_attn_config": {
                "num_heads": 4,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 3],
                "full_attn_layers": [2],
            },
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "num_key_value_heads": 6,
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        "",
        MAMBA2
        | {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
    "bamba": ("Bamba", "", MAMBA2 | {"attn_layer_indices": [1]}),
    "nemotron_h": (
        "NemotronH",
        "",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
            "num_hidden_layers": 5,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "ssm_state_size": 10,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
            "head_dim": 8,
        },
    ),
    "falcon_h1": ("FalconH1", "", MAMBA2 | {"mamba_d_ssm": 96}),
    "zamba2": (
        "Zamba2",
        "",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
            "mamba_d_state": 10,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_headdim": 12,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "num_key_value_heads": 6,
            "attention_head_dim": 16,
            "adapter_rank": 4,
        },
    ),
    "mamba2": ("Mamba2", "", {"num_heads": 8, "head_dim": 12, "state_size": 10, "n_groups": 2, "chunk_size": 8}),
    "lfm2": ("Lfm2", "", CONV_OR_FULL | {"block_multiple_of": 8}),
    "lfm2_moe": ("Lfm2Moe", "", CONV_OR_FULL | FEW_EXPERTS | {"num_dense_layers": 1}),
    "jamba": (
        "Jamba",
        "",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "mamba": ("Mamba", "", {"state_size": 8}),
    "falcon_mamba": ("FalconMamba", "", {"state_size": 8}),
    "zamba": (
        "Zamba",
        "",
        {
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 2,
            "mamba_dt_rank": 4,
            "num_key_value_heads": 6,
        },
    ),
}
"""Models whose layers keep recurrent states: the names of configuration and class (empty: the same), and changes."""


def make_reference(name: str, changes: dict[str, Any], *, architecture: str = "", **init: Any):
    """A transformers model with random weights, norms and biases included. architecture: its class; empty: that of
    the name."""
    import transformers

    torch.manual_seed(len(name) + len(changes))
    config = getattr(transformers, f"{name}Config")(**(TINY | changes | init))
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # torch's attention has no soft cap
    model = getattr(transformers, architecture or f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, value in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith(("e_score_correction_bias", "expert_bias")):  # zeros, too
                value.copy_(torch.randn_like(value) * 0.2)
        for key, value in model.named_parameters():
            if value.dim() == 1:  # ones and zeros by default: they would hide a norm or a bias that is not read
                value.copy_(torch.randn_like(value) * 0.3 + (1.0 if "norm" in key else 0.0))
    return model


def save_reference(key: str, folder: Path):
    """Make MODELS[key], save it in several shards, return it."""
    name, changes = MODELS[key]
    reference = make_reference(name, changes)
    reference.save_pretrained(folder, max_shard_size="40KB")
    return reference
