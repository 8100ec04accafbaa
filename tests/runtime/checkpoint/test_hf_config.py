from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from baton.runtime.checkpoint.hf_config import load_model_config, parse_model_config
from baton.runtime.checkpoint.model_files import ModelLoadError, UnsupportedModelError
from baton.runtime.model_config import ExpertTraits, LatentTraits, Mamba2Traits, Mixer, RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
GLM_MOE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
DEEPSEEK: dict[str, Any] = {name: value for name, value in GLM_MOE.items() if name != "architectures"} | {
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 4,
}
V2, V3 = ({"architectures": [f"DeepseekV{number}ForCausalLM"]} | DEEPSEEK for number in (2, 3))
PHI: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"]}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(changes: dict[str, Any] | None = None, generation: dict[str, Any] | None = None, **options: Any):
    return parse_model_config(LLAMA | (changes or {}), generation, **options)


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in LLAMA.items() if name != key}


def test_plain_llama_config():
    config = parse()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 8, 2, 8)
    assert (config.context_length, config.eos_token_ids, config.bos_token_id) == (256, (2,), 1)
    assert (
        config.ropes == (RopeConfig(theta=10000.0),) * 4
        and not config.tie_word_embeddings
        and config.dtype == "float32"
    )
    assert config.traits.layer_windows == (None,) * 4 and not config.traits.qkv_bias


def test_old_and_new_config_spellings_are_equal():
    old = parse({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}, "torch_dtype": "bfloat16"})
    new = parse({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "dtype": "bfloat16"})
    rope = old.ropes[0]
    assert old == new and rope is not None and rope.theta == 5e5 and rope.factor == 8.0 and old.dtype == "bfloat16"


def test_explicit_head_dim_and_missing_kv_heads():
    assert parse({"head_dim": 20}).head_dim == 20
    assert parse_model_config(without("num_key_value_heads")).num_kv_heads == 8


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [(2, None, (2,)), ([2, 3], None, (2, 3)), (2, {"eos_token_id": [5, 6]}, (5, 6)), (None, {}, ()), (2, {}, (2,))],
)
def test_eos_of_generation_config_takes_precedence(config_eos, generation, expected):
    assert parse({"eos_token_id": config_eos}, generation).eos_token_ids == expected


def test_traits_of_each_architecture():
    def traits(name: str, **changes: Any):
        return parse({"architectures": [f"{name}ForCausalLM"], **changes}).traits

    assert traits("Llama", attention_bias=True).o_bias
    assert traits("Mistral", sliding_window=40).layer_windows == (40,) * 4
    assert traits("Mistral", sliding_window=None).layer_windows == (None,) * 4
    qwen2 = traits("Qwen2", sliding_window=40)  # use_sliding_window is off
    assert qwen2.qkv_bias and not qwen2.o_bias and qwen2.layer_windows == (None,) * 4
    older = traits("Qwen2", use_sliding_window=True, sliding_window=40, max_window_layers=3)
    assert older.layer_windows == (None, None, None, 40)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert traits("Qwen2", use_sliding_window=True, sliding_window=40, layer_types=kinds).layer_windows == (
        40,
        None,
        40,
        None,
    )
    qwen3 = traits("Qwen3")
    assert qwen3.qk_norm and not qwen3.qkv_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported; supported are .*Llama.*, .*Qwen3",
        ),
        ({"architectures": None}, "missing is not supported"),
        ({"architectures": ["Qwen9ForCausalLM"]}, "similar names are Qwen[23]ForCausalLM, Qwen[23]ForCausalLM"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4}}, "'axial' is not supported; supported are default"),
        (PHI | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1]}}, "longrope has 1 factors for 4 pairs"),
        (PHI | {"rope_scaling": {"rope_type": "longrope"}}, "has no 'short_factor'"),
        (MIXTRAL | {"num_local_experts": 1}, "uses 2 experts of 1"),
        (MIXTRAL | {"num_local_experts": None}, "no 'num_experts', which Mixtral"),
        (GLM_MOE | {"n_group": 3}, "8 experts cannot be divided into 3 groups"),
        (
            GLM_MOE | {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            "3 experts, but 1 of 4 groups hold only 2",
        ),
        (GLM_MOE | {"n_group": 8, "topk_group": 4}, "compared by their 2 best experts, but 8 experts in 8 groups"),
        (V2 | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc': DeepSeek-V2 has greedy and group_limited_greedy"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (V3 | {"kv_lora_rank": None}, "no 'kv_lora_rank'"),
        (V3 | {"qk_rope_head_dim": 5}, "head_dim 5.*even"),
        (PHI | {"partial_rotary_factor": 0.4}, "rotates 3 of 8 coordinates"),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 9}, "has no 'query_pre_attn_scalar', which Gemma2"),
        ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, "an encoder"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "has no 'low_freq_factor'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "relu2"}, "'relu2' is not supported; supported are silu"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quantised weights \(hqq\)"),
        ({"num_key_value_heads": 3}, "multiple of KV heads"),
        ({"head_dim": 7}, "head_dim even"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"vocab_size": None}, "no 'vocab_size'"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention"],
            },
            "1 entries for 4 layers",
        ),
    ],
)
def test_unsupported_model_configs_are_refused(changes, message):
    with pytest.raises(ModelLoadError, match=message):
        parse(changes)


def test_latent_attention():
    """Heads are of the rotated part, which is rotated as a whole, whatever says how much of a head that is."""
    config = parse(V3 | {"head_dim": 16, "partial_rotary_factor": 0.375})
    latent = LatentTraits(query_rank=None, latent_size=20, plain_size=10, rotary_size=6, value_size=4)
    assert (config.head_dim, config.num_kv_heads, config.ropes) == (6, 8, (RopeConfig(theta=10000.0),) * 4)
    assert config.traits.latent == latent and latent.key_size == 26
    assert config.traits.attention_scale == 0.25 and config.traits.is_interleaved and config.traits.needs_torch
    assert not parse(V3 | {"rope_interleave": False}).traits.is_interleaved


def test_yarn_sharpens_latent_attention():
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale_all_dim": 0.707}
    mscale = 0.1 * 0.707 * math.log(40) + 1
    for key in ("rope_scaling", "rope_parameters"):
        assert parse(V2 | {key: yarn}).traits.attention_scale == pytest.approx(0.25 * mscale**2)
        for changes in ({"mscale_all_dim": 0}, {"factor": 1}, {"type": "default"}):
            assert parse(V2 | {key: yarn | changes}).traits.attention_scale == 0.25


LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 32,
}


def test_layers_of_llama4():
    """By intervals and by lists."""
    traits = parse(LLAMA4 | {"interleave_moe_layer_step": 2, "no_rope_layers": []}).traits
    assert traits.layer_chunks == (32, 32, 32, None) and traits.rotates == (True, True, True, False)
    assert traits.experts is not None and traits.experts.is_sparse == (False, True, False, True)
    lists = {"no_rope_layers": [0, 1, 1, 1], "moe_layers": [0], "layer_types": ["full_attention"] * 4}
    traits = parse(LLAMA4 | lists).traits
    assert traits.layer_chunks == (None,) * 4 and traits.rotates == (False, True, True, True)
    assert traits.experts is not None and traits.experts.is_sparse == (True, False, False, False)


def test_positions_scale_queries_where_they_can():
    """Only layers without rotation, and only if a position reaches the length."""
    scales = {length: parse(LLAMA4 | {"floor_scale": length}) for length in (256, 257)}
    assert [scales[256].position_scale(layer) is None for layer in range(4)] == [True, True, True, False]
    assert scales[257].position_scale(3) is None
    assert parse(LLAMA4 | {"floor_scale": 8, "attn_temperature_tuning": False}).position_scale(3) is None


def test_experts_of_deepseek():
    def experts(changes: dict[str, Any]) -> ExpertTraits:
        found = parse(changes | {"n_group": 4, "topk_group": 2}).traits.experts
        assert found is not None
        return found

    greedy, limited = (experts(V2 | {"topk_method": method}) for method in (None, "group_limited_greedy"))
    assert (greedy.num_groups, limited.num_groups, limited.top_groups, limited.group_best) == (1, 4, 2, 1)
    assert not limited.renormalises and limited.names.correction is None and limited.routes_in_float32
    third = experts(V3 | {"first_k_dense_replace": 3})
    assert (third.num_groups, third.group_best, third.renormalises) == (4, 2, True)
    assert third.is_sparse == (False, False, False, True) and third.names.correction
    lite = {"architectures": ["Glm4MoeLiteForCausalLM"]} | DEEPSEEK
    assert experts(lite).is_sparse == (False, True, True, True)
    assert experts(lite | {"mlp_layer_types": ["sparse", "dense"] * 2}).is_sparse == (True, False, True, False)


def test_context_length_is_bounded_by_model():
    assert parse(context_length=100).context_length == 100
    assert parse(context_length=100).max_position_embeddings == 256
    for wrong in (257, -1):
        with pytest.raises(ModelLoadError, match=f"--context-length {wrong} .*256 positions"):
            parse(context_length=wrong)


def test_model_config_is_read_from_folder(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert load_model_config(tmp_path).eos_token_ids == (9,)


def test_reading_a_config_does_not_import_torch():
    code = "import sys, baton.runtime.checkpoint.hf_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def first_rope(changes: dict[str, Any], **options: Any) -> RopeConfig:
    rope = parse(changes, **options).ropes[0]
    assert rope is not None
    return rope


def test_rope_parameters_per_layer_type_in_both_spellings():
    gemma = {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 8, "sliding_window": 9}
    gemma["layer_types"] = ["sliding_attention", "full_attention"] * 2
    linear = {"rope_type": "linear", "factor": 8.0}
    old = parse(gemma | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": linear})
    by_kind = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": linear | {"rope_theta": 1e6}}
    new = parse(gemma | {"rope_parameters": by_kind})
    assert old == new and new.tie_word_embeddings
    assert new.ropes == (RopeConfig(theta=1e4), RopeConfig(theta=1e6, rope_type="linear", factor=8.0)) * 2


def test_longrope_factors_depend_on_the_context_length():
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    changes = PHI | {"rope_scaling": rope, "original_max_position_embeddings": 64}
    assert first_rope(changes).factors == (2.0,) * 4
    short = first_rope(changes, context_length=64)
    assert short.factors == (1.0,) * 4 and short.attention_factor == pytest.approx(math.sqrt(1 + 1 / 3))


def test_yarn_attention_factor():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

    def factor(**more: float) -> float:
        return first_rope({"rope_scaling": yarn | more}).attention_factor

    assert factor() == pytest.approx(0.1 * math.log(4) + 1)
    assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert factor(attention_factor=0.5) == 0.5


DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16}
A, R, NONE = Mixer.ATTENTION, Mixer.RECURRENT, Mixer.NONE


def test_layers_with_states_in_all_spellings():
    """Files as they are on the hub, and as transformers 5 saves them."""

    def traits(name: str, **changes: Any):
        return parse({"architectures": [f"{name}ForCausalLM"], **changes}).traits

    every_fourth = traits("Qwen3_5", **DELTA)
    assert every_fourth.mixers == (R, R, R, A) == traits("Qwen3_5", **DELTA, full_attention_interval=4).mixers
    assert traits("Qwen3_5", **DELTA, full_attention_interval=2).mixers == (R, A, R, A)
    assert every_fourth.output_gate and every_fourth.norm_offset == 1
    assert traits("Lfm2", full_attn_idxs=[1, 2]).mixers == (R, A, A, R)
    assert traits("Bamba", **MAMBA, attn_layer_indices=[3]).mixers == (R, R, R, A)
    granite = {"shared_intermediate_size": 48, "mamba_n_heads": 8, "mamba_d_state": 16}
    for kinds in (["mamba", "attention"] * 2, ["linear_attention", "full_attention"] * 2):
        assert traits("GraniteMoeHybrid", **granite, layer_types=kinds).mixers == (R, A) * 2
    nemotron = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16}
    by_letter = traits("NemotronH", **nemotron, hybrid_override_pattern="M-*-M")
    blocks = ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
    assert by_letter == traits("NemotronH", **nemotron, layers_block_type=blocks)
    assert by_letter.mixers == (R, NONE, A, NONE, R) and by_letter.has_mlp == (False, True, False, True, False)
    with pytest.raises(UnsupportedModelError, match="experts of Nemotron-H"):
        traits("NemotronH", **nemotron, hybrid_override_pattern="ME*E")


def test_sizes_of_hybrids():
    def config(name: str, **changes: Any):
        return parse({"architectures": [f"{name}ForCausalLM"], **changes})

    lfm2 = config("Lfm2", block_ff_dim=12288, block_multiple_of=256, norm_eps=3e-5)
    assert lfm2.intermediate_size == 8192 and lfm2.rms_norm_eps == 3e-5 and lfm2.tie_word_embeddings
    assert config("Lfm2", block_ff_dim=100, block_auto_adjust_ff_dim=False).intermediate_size == 100
    mamba = config("Bamba", **MAMBA, mamba_d_head="auto").traits.recurrent
    assert isinstance(mamba, Mamba2Traits) and mamba.heads * mamba.head_size == 2 * LLAMA["hidden_size"]
    limits = [0.01, {"__float__": "Infinity"}]
    limited = config("Bamba", **MAMBA, time_step_limit=limits).traits.recurrent
    assert isinstance(limited, Mamba2Traits) and limited.limits == (0.01, math.inf)


def test_layers_without_rotary_embedding():
    smollm3 = parse({"architectures": ["SmolLM3ForCausalLM"]})
    assert [rope is None for rope in smollm3.ropes] == [False, False, False, True]
