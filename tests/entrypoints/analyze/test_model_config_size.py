"""Sizes of tokens and states from config.json, and of pools of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.analyze.model_config_size import read_model_size
from baton.entrypoints.analyze.model_size import ModelSize, ModelSizeError
from baton.entrypoints.analyze.pool_sizes import GIB, PoolSizes
from baton.runtime.checkpoint.hf_config import parse_model_config

BASE = {
    "vocab_size": 1000,
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
}
QWEN3_NEXT = BASE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 48,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
GEMMA3 = BASE | {
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 12,
    "num_key_value_heads": 4,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_local_base_freq": 1e4,
}


def write_config(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def bytes_per_token(folder: Path) -> int:
    size = read_model_size(folder)
    assert size == ModelSize(bytes_per_token=size.bytes_per_token)
    return size.bytes_per_token


def test_bytes_per_token_come_from_model_config(tmp_path: Path) -> None:
    llama = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    assert bytes_per_token(write_config(tmp_path, **llama, torch_dtype="bfloat16")) == 131072
    assert bytes_per_token(write_config(tmp_path, **llama, head_dim=64, dtype="float32")) == 131072
    assert bytes_per_token(write_config(tmp_path, text_config=llama | {"dtype": "float16"})) == 131072
    del llama["num_key_value_heads"]
    assert bytes_per_token(write_config(tmp_path, **llama)) == 4 * 262144


def test_bytes_per_token_of_latents(tmp_path: Path) -> None:
    """DeepSeek-V3: 61 layers of 512 + 64 numbers, not 128 heads of 192 + 128."""
    config = BASE | {
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
    }
    folder = write_config(tmp_path, **config, architectures=["DeepseekV3ForCausalLM"])
    assert bytes_per_token(folder) == 61 * 576 * 2


def test_size_of_recurrent_states(tmp_path: Path) -> None:
    """Twelve of 48 layers keep K and V; each other one a matrix for each value head in float32, and the last inputs of
    a convolution."""
    size = read_model_size(write_config(tmp_path, **QWEN3_NEXT))
    conv, matrices = 3 * (2 * 16 * 128 + 32 * 128), 32 * 128 * 128
    assert size.bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert size.bytes_per_state == 36 * (2 * conv + 4 * matrices) and size.window == 0
    assert PoolSizes(size).states_gib(10) == 12 * size.bytes_per_state / GIB, "two are not handed out"


def test_size_of_layers_with_a_window(tmp_path: Path) -> None:
    size = read_model_size(write_config(tmp_path, **GEMMA3))
    layer = 2 * 4 * 256 * 2
    assert size == ModelSize(
        bytes_per_token=12 * layer,
        window=1024,
        bytes_per_window_token=10 * layer,
        context_length=32768,
    )


def test_windows_beside_states_share_one_pool() -> None:
    from baton.entrypoints.analyze.served_size import served_size

    config = parse_model_config(QWEN3_NEXT)
    plain = served_size(config)
    windows = tuple(100 if config.traits.has_attention(layer) else None for layer in range(config.num_layers))
    both = served_size(replace(config, traits=replace(config.traits, layer_windows=windows)))
    assert both == plain and both.window == 0 and both.bytes_per_state > 0


def test_pools_with_windows_are_divided_as_the_server_does(tmp_path: Path) -> None:
    sizes = PoolSizes(read_model_size(write_config(tmp_path, **GEMMA3)))
    layer, tokens = 2 * 4 * 256 * 2, 1_000_000
    windows = sizes.window_tokens(tokens)
    assert 0 < windows < tokens // 5
    assert sizes.device_gib(tokens) == (2 * tokens + 10 * windows) * layer / GIB
    assert sizes.shared_gib(tokens) == 12 * tokens * layer / GIB
    few = 1000
    assert sizes.window_tokens(few) == 0 and sizes.device_gib(few) == sizes.shared_gib(few)
    wide = PoolSizes(sizes.model, 16, 0.5)
    assert wide.window_tokens(tokens) == tokens // 2
    assert sizes.device_gib(0) == 0.0


@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("gib", [0.001, 0.5, 40.0])
def test_tokens_of_a_given_memory_fit(tmp_path: Path, gib: float, ratio: float) -> None:
    sizes = PoolSizes(read_model_size(write_config(tmp_path, **GEMMA3)), 1, ratio)
    tokens = sizes.device_tokens(gib)
    fits, too_many = sizes.device_gib(tokens), sizes.device_gib(tokens + 1)
    assert fits is not None and too_many is not None and fits <= gib < too_many
    plain = PoolSizes(ModelSize(bytes_per_token=1000))
    assert plain.device_tokens(gib) == int(gib * GIB / 1000)


def test_sizes_without_a_model_are_unknown() -> None:
    sizes = PoolSizes(None)
    assert sizes.device_gib(10) is sizes.shared_gib(10) is sizes.states_gib(10) is None and sizes.window_tokens(10) == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_lora_rank": 512}, "keeps a compressed KV; give --kv-bytes-per-token"),
        ({"kv_lora_rank": 512, "architectures": ["LongcatFlashForCausalLM"]}, "keeps a compressed KV"),
        ({"num_hidden_layers": 2, "num_attention_heads": 4}, "has no hidden_size"),
        ({"num_attention_heads": 4, "head_dim": 4, "num_hidden_layers": 0}, "has no num_hidden_layers"),
        ({"num_attention_heads": 4, "head_dim": 4, "num_hidden_layers": 1, "dtype": "float8"}, "dtype float8"),
        ({"num_attention_heads": 4, "head_dim": -4, "num_hidden_layers": 1}, "less than nothing"),
        ({"mamba_d_state": 16, "num_hidden_layers": 4}, "not all of its layers keep K and V"),
        ({"architectures": ["LlamaForCausalLM"]}, "the server would not load it: .* has no 'num_attention_heads'"),
        ({"architectures": 7}, "has no num_key_value_heads"),
        (QWEN3_NEXT | {"layer_types": ["full_attention"] * 3}, "config.json contradicts itself"),
        (QWEN3_NEXT | {"linear_num_key_heads": "many"}, "config.json contradicts itself"),
        (QWEN3_NEXT | {"linear_conv_kernel_dim": -4}, "config.json contradicts itself"),
        (GEMMA3 | {"layer_types": ["sliding_attention"]}, "has 1 entries for 12 layers"),
        (GEMMA3 | {"sliding_window": -5}, "window or chunk has less than one token"),
    ],
)
def test_config_without_sizes_is_refused(tmp_path: Path, fields: dict, reason: str) -> None:
    with pytest.raises(ModelSizeError, match=reason):
        read_model_size(write_config(tmp_path, **fields))


def test_folder_without_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelSizeError, match="cannot be read: No such file"):
        read_model_size(tmp_path)
    for text, reason in (("[1]", "is not a JSON object"), ("{", "is not valid JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelSizeError, match=reason):
            read_model_size(tmp_path)


@pytest.mark.equality
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2", "mamba2", "gemma3", "mistral, window"])
def test_sizes_are_those_of_the_pools_of_a_loaded_model(tmp_path: Path, name: str) -> None:
    from baton.memory_pool.kv_pool import WindowedKVPool
    from baton.runtime.config import ModelArgs
    from baton.runtime.runner.model_runner import ModelRunner
    from tests.doubles.forced_options import FORCED
    from tests.doubles.tiny_models import save_reference

    save_reference(name, tmp_path)
    size = read_model_size(tmp_path)
    runner = ModelRunner(
        ModelArgs(model_path=str(tmp_path), device="cpu", model_impl="baton", **FORCED),
        context_length=0,
        num_rows=3,
        page_size=1,
        max_total_tokens=2048,
        max_states=8,
        chunked_prefill_size=40,
        window_ratio=0.2,
    )
    pool, states = runner.kv_pool, runner.state_pool
    assert size.bytes_per_state == (states.bytes_per_state if states is not None else 0)
    assert size.window == runner.window
    if isinstance(pool, WindowedKVPool):
        assert size.bytes_per_window_token == pool.windows.bytes_per_token > 0
        assert size.bytes_per_token == pool.full.bytes_per_token + pool.windows.bytes_per_token
    else:
        assert size.bytes_per_token == pool.bytes_per_token and not size.bytes_per_window_token
