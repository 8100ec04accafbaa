"""Tiny models with seeded random weights, one of each architecture, made with transformers' own classes.

Weights are large (0.2), so that logits have real gaps and the most likely token is never a matter of rounding. A model
has every kind of layer that its family has: windows and full attention, dense and expert layers, shared KV.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch

VOCABULARY = 200

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
HEADS: dict[str, Any] = {"head_dim": 8}
WINDOWS: dict[str, Any] = {"sliding_window": 20, "use_sliding_window": True}
MIXED: dict[str, Any] = WINDOWS | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "v_head_dim": 6,
    "head_dim": 4,
    "num_key_value_heads": 6,
}
GATED_DELTA: dict[str, Any] = HEADS | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
KIMI_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
    },
}
GPT2: dict[str, Any] = {"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 512, "n_inner": 80}
_GPT2_ALIASES = {
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "intermediate_size",
}
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    }
}
LONGROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 2.5, 3.0],
        "original_max_position_embeddings": 512,
    },
    "original_max_position_embeddings": 512,
}


@dataclass(frozen=True)
class TinyModel:
    """config, model: names of transformers' classes, without the ending Config or ForCausalLM; model: empty for the
    config's. changes: to BASE."""

    name: str
    config: str
    model: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    drops: frozenset[str] = frozenset()
    """Fields of BASE that the config must not be given."""

    @property
    def architecture(self) -> str:
        name = self.model or self.config
        return name if name.endswith(("Model", "LM")) else f"{name}ForCausalLM"

    def make(self) -> Any:
        """The model, in float32, with random norms and biases too: ones and zeros would hide what is not read."""
        import transformers

        torch.manual_seed(1)
        given = {name: value for name, value in BASE.items() if name not in self.drops} | self.changes
        config = getattr(transformers, f"{self.config}Config")(**given)
        model = getattr(transformers, self.architecture)(config).float().eval()
        with torch.no_grad():
            for name, value in model.named_parameters():
                if value.dim() == 1:
                    value.copy_(torch.randn_like(value) * 0.2 + (1.0 if "norm" in name or "ln_" in name else 0.0))
        return model

    def save(self, folder: Path) -> Any:
        """Write a Hugging Face folder, with a tokenizer of single bytes, and return the model."""
        model = self.make()
        model.save_pretrained(folder)
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
        tokenizer = tokenizers.Tokenizer(
            tokenizers.models.BPE({byte: number for number, byte in enumerate(alphabet)}, [])
        )
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))
        return model


def tiny(name: str, config: str, model: str = "", drops: set[str] | None = None, **changes: Any) -> TinyModel:
    return TinyModel(name, config, model, changes, frozenset(drops or ()))


MODELS: tuple[TinyModel, ...] = (
    tiny("Llama 2, 3", "Llama"),
    tiny("Llama 3.1 (rope llama3)", "Llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
    tiny("Llama, rope linear", "Llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    tiny("Llama, rope yarn", "Llama", **YARN),
    tiny("Llama, rope dynamic", "Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0,
         "original_max_position_embeddings": 512}),
    tiny("Llama 4 (text)", "Llama4Text", "Llama4", attention_chunk_size=32, **HEADS, **EXPERTS),
    tiny("Mistral", "Mistral", sliding_window=20),
    tiny("Ministral", "Ministral", **HEADS, **MIXED),
    tiny("Ministral 3", "Ministral3", **HEADS, sliding_window=None),
    tiny("Mistral 4", "Mistral4", **(LATENT | {"head_dim": 12}), **EXPERTS),
    tiny("Mixtral", "Mixtral", **EXPERTS),
    tiny("Qwen 2, 2.5", "Qwen2"),
    tiny("Qwen 2, windows", "Qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1),
    tiny("Qwen 2 MoE", "Qwen2Moe", **EXPERTS),
    tiny("Qwen 3", "Qwen3", **HEADS),
    tiny("Qwen 3 MoE", "Qwen3Moe", **HEADS, **EXPERTS),
    tiny("Qwen 3 Next", "Qwen3Next", **GATED_DELTA, **EXPERTS),
    tiny("Qwen 3.5", "Qwen3_5Text", "Qwen3_5", **GATED_DELTA),
    tiny("Qwen 3.5 MoE", "Qwen3_5MoeText", "Qwen3_5Moe", **GATED_DELTA, **EXPERTS),
    tiny("Gemma", "Gemma", **HEADS),
    tiny("Gemma 2", "Gemma2", **HEADS, query_pre_attn_scalar=8, **MIXED),
    tiny("Gemma 3 (text)", "Gemma3Text", "Gemma3", **HEADS, query_pre_attn_scalar=8, **MIXED),
    tiny("Gemma 3n (text)", "Gemma3nText", "Gemma3n", **HEADS, num_hidden_layers=4, num_kv_shared_layers=2,
         layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=20, hidden_size_per_layer_input=8,
         vocab_size_per_layer_input=VOCABULARY, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4),
    tiny("Gemma 4 (text)", "Gemma4Text", "Gemma4", **HEADS, global_head_dim=16, num_kv_shared_layers=0,
         hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY, **MIXED),
    tiny("Gemma 4, shared KV", "Gemma4Text", "Gemma4", **HEADS, global_head_dim=16, num_kv_shared_layers=2,
         num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=20,
         use_double_wide_mlp=True, final_logit_softcapping=5.0, hidden_size_per_layer_input=8,
         vocab_size_per_layer_input=VOCABULARY),
    tiny("Gemma 4, keys as values", "Gemma4Text", "Gemma4", **HEADS, global_head_dim=16, num_global_key_value_heads=1,
         attention_k_eq_v=True, num_kv_shared_layers=0, hidden_size_per_layer_input=0, num_hidden_layers=4,
         layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=20),
    tiny("Gemma 4 MoE", "Gemma4Text", "Gemma4", **HEADS, global_head_dim=16, enable_moe_block=True, num_experts=4,
         top_k_experts=2, moe_intermediate_size=24, num_kv_shared_layers=0, hidden_size_per_layer_input=8,
         vocab_size_per_layer_input=VOCABULARY, num_hidden_layers=4,
         layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=20),
    tiny("VaultGemma", "VaultGemma", **HEADS, query_pre_attn_scalar=8, **MIXED),
    tiny("gpt-oss", "GptOss", **HEADS, **EXPERTS, **MIXED, **YARN),
    tiny("Granite 3", "Granite", logits_scaling=2.0, residual_multiplier=0.7, attention_multiplier=0.4),
    tiny("Granite MoE", "GraniteMoe", **EXPERTS, logits_scaling=2.0),
    tiny("Granite MoE, shared experts", "GraniteMoeShared", **EXPERTS, shared_intermediate_size=24),
    tiny("Granite 4 H (hybrid)", "GraniteMoeHybrid", **EXPERTS, shared_intermediate_size=24,
         layer_types=["mamba", "attention", "mamba"], mamba_n_heads=6, mamba_d_head=16),
    tiny("Granite 4 (attention only)", "GraniteMoeHybrid", **EXPERTS, shared_intermediate_size=24,
         layer_types=["attention"] * 3, mamba_n_heads=6, mamba_d_head=16),
    tiny("Phi 1, 2", "Phi"),
    tiny("Phi 3, 4", "Phi3", **WINDOWS),
    tiny("Phi 3 (longrope)", "Phi3", sliding_window=None, **LONGROPE),
    tiny("Phi 3.5 MoE", "Phimoe", **EXPERTS, sliding_window=None, rope_parameters={"rope_type": "default",
         "rope_theta": 1e4}),
    tiny("SmolLM 3", "SmolLM3", no_rope_layer_interval=2),
    tiny("OLMo", "Olmo"),
    tiny("OLMo 2", "Olmo2"),
    tiny("OLMo 3", "Olmo3", **MIXED),
    tiny("OLMoE", "Olmoe", **EXPERTS),
    tiny("FlexOLMo", "FlexOlmo", **EXPERTS),
    tiny("GLM 4 (9B)", "Glm", **HEADS),
    tiny("GLM 4 (0414)", "Glm4", **HEADS),
    tiny("GLM 4.5", "Glm4Moe", **HEADS, **EXPERTS),
    tiny("GLM 4.7 Flash", "Glm4MoeLite", **LATENT, **EXPERTS, mlp_layer_types=["dense", "sparse", "sparse"]),
    tiny("Seed-OSS", "SeedOss", **HEADS),
    tiny("ERNIE 4.5", "Ernie4_5", **HEADS),
    tiny("ERNIE 4.5 MoE", "Ernie4_5_Moe", **EXPERTS),
    tiny("DeepSeek V2", "DeepseekV2", **LATENT, **EXPERTS),
    tiny("DeepSeek V3, Kimi K2", "DeepseekV3", **LATENT, **EXPERTS),
    tiny("DeepSeek V3.2", "DeepseekV32", **LATENT, **EXPERTS, index_n_heads=2, index_head_dim=8, index_topk=16),
    tiny("Kimi Linear", "KimiLinear", **LATENT, **EXPERTS, **KIMI_DELTA),
    tiny("Hunyuan", "HunYuanDenseV1", **HEADS),
    tiny("Hunyuan MoE", "HunYuanMoEV1", **HEADS, **EXPERTS),
    tiny("Apertus", "Apertus", **YARN),
    tiny("Arcee", "Arcee"),
    tiny("Trinity (AFMoE)", "Afmoe", **HEADS, **EXPERTS, **MIXED, num_dense_layers=1),
    tiny("Command R", "Cohere"),
    tiny("Command R7B, A", "Cohere2", **HEADS, **MIXED),
    tiny("CWM", "Cwm", bos_token_id=1, eos_token_id=2, **HEADS, **MIXED),
    tiny("Helium", "Helium", **HEADS),
    tiny("Nemotron 4, Minitron", "Nemotron"),
    tiny("StableLM 2", "StableLm", partial_rotary_factor=0.5),
    tiny("StarCoder 2", "Starcoder2", sliding_window=20),
    tiny("SmolLM, TinyLlama (tied)", "Llama", tie_word_embeddings=True),
    tiny("GPT-2", "GPT2", "GPT2LMHeadModel", _GPT2_ALIASES, **GPT2),
    tiny("StarCoder (GPT-BigCode)", "GPTBigCode", "", _GPT2_ALIASES, **GPT2),
    tiny("GPT-NeoX, Pythia", "GPTNeoX", rotary_pct=0.5),
    tiny("GPT-J", "GPTJ", "", _GPT2_ALIASES, **GPT2, rotary_dim=4),
    tiny("GPT-Neo", "GPTNeo", "", {"num_hidden_layers"}, num_layers=2, num_heads=6,
         attention_types=[[["global", "local"], 1]], window_size=20),
    tiny("CodeGen", "CodeGen", "", _GPT2_ALIASES, **(GPT2 | {"n_head": 4}), rotary_dim=4),
    tiny("OPT", "OPT", ffn_dim=80, word_embed_proj_dim=48),
    tiny("BLOOM", "Bloom", n_layer=3, n_head=6),
    tiny("Falcon", "Falcon", num_kv_heads=2, new_decoder_architecture=True),
    tiny("MPT", "Mpt", d_model=48, n_heads=6, n_layers=3, max_seq_len=512),
    tiny("Persimmon", "Persimmon"),
    tiny("EXAONE 4", "Exaone4", **HEADS, **MIXED),
    tiny("EXAONE MoE", "ExaoneMoe", **HEADS, **EXPERTS, **MIXED),
    tiny("BitNet", "BitNet"),
    tiny("dots.llm1", "Dots1", n_shared_experts=1, **HEADS, **EXPERTS),
    tiny("Doge", "Doge", **HEADS),
    tiny("DiffLlama", "DiffLlama"),
    tiny("DBRX", "Dbrx", drops={"num_key_value_heads"}, d_model=48, n_heads=6, n_layers=3, max_seq_len=512,
         ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
         attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}),
    tiny("MiniCPM 3", "MiniCPM3", **LATENT),
    tiny("MiniMax M2", "MiniMaxM2", **HEADS, **EXPERTS, rotary_dim=4),
    tiny("MiniMax Text 01 (hybrid)", "MiniMax", **HEADS, **EXPERTS),
    tiny("MiMo V2 Flash", "MiMoV2Flash", **HEADS, **EXPERTS, **MIXED),
    tiny("LongCat Flash", "LongcatFlash", **LATENT, **EXPERTS, num_layers=2, ffn_hidden_size=80,
         expert_ffn_hidden_size=24, zero_expert_num=1),
    tiny("JetMoE", "JetMoe", **EXPERTS, kv_channels=8),
    tiny("NanoChat", "NanoChat"),
    tiny("Solar Open", "SolarOpen", **HEADS, **EXPERTS),
    tiny("Youtu", "Youtu", **LATENT),
    tiny("Jais 2", "Jais2", **HEADS),
    tiny("HyperCLOVA X", "HyperCLOVAX", **HEADS),
    tiny("ModernBERT decoder", "ModernBertDecoder", pad_token_id=0, bos_token_id=1, eos_token_id=2,
         num_attention_heads=6, local_attention=20,
         global_attn_every_n_layers=2),
    tiny("BioGPT", "BioGpt"),
    tiny("LFM 2 (hybrid)", "Lfm2", layer_types=["conv", "full_attention", "conv"]),
    tiny("Jamba (hybrid)", "Jamba", **EXPERTS, attn_layer_period=3, attn_layer_offset=1),
    tiny("Bamba (hybrid)", "Bamba", mamba_n_heads=6, mamba_d_head=16, attn_layer_indices=[1]),
    tiny("Falcon H1 (hybrid)", "FalconH1", mamba_d_ssm=48, mamba_n_heads=6, mamba_d_head=8),
    tiny("Nemotron H (hybrid)", "NemotronH", mamba_num_heads=6, mamba_head_dim=16, n_groups=2,
         hybrid_override_pattern="M*-"),
    tiny("OLMo Hybrid", "OlmoHybrid", **{**GATED_DELTA, "linear_num_key_heads": 4}),
    tiny("RecurrentGemma (hybrid)", "RecurrentGemma", **HEADS, lru_width=48),
    tiny("Mamba", "Mamba"),
    tiny("Mamba 2", "Mamba2", num_heads=6, head_dim=16, n_groups=2),
    tiny("RWKV 4", "Rwkv"),
    tiny("xLSTM", "xLSTM"),
)  # fmt: skip
"""Every architecture of the table, in its order."""
