"""Sizes of models from their config.json, compared with the pools that a server makes for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.simulate.cost_model import MODELS, CostError, ModelSizes
from baton.entrypoints.simulate.model_folder import read_model_sizes

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
SMALL = LLAMA_8B | {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
HALF_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
GEMMA = {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 16, **HALF_WINDOWS}
LFM2 = {"architectures": ["Lfm2ForCausalLM"], "norm_eps": 1e-5, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
LFM2 |= {"layer_types": ["conv", "full_attention", "conv", "conv"]}
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
EXPERTS |= {"moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []}


def sizes(tmp_path: Path, config: dict[str, Any]) -> ModelSizes:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_model_sizes(tmp_path)


def test_a_dense_model_is_what_its_shape_says(tmp_path: Path) -> None:
    """The shape leaves out norms alone."""
    found, shape = sizes(tmp_path, LLAMA_8B), MODELS["llama-3.1-8b"]
    assert found.name == tmp_path.name
    assert found.bytes_per_token == shape.bytes_per_token and found.pair_products == shape.pair_products
    assert found.head_parameters == shape.head_parameters and found.layers == shape.layers
    for name in ("body_parameters", "weight_bytes", "read_bytes"):
        assert 0 <= getattr(found, name) / getattr(shape, name) - 1 < 1e-4
    assert read_model_sizes(tmp_path / "config.json") == found


def test_states_of_a_hybrid_are_sized(tmp_path: Path) -> None:
    found = sizes(tmp_path, SMALL | LFM2)
    assert found.bytes_per_state == 3 * 2 * 64 * 2  # two inputs of 64 channels, in three layers
    assert found.bytes_per_token == 2 * 2 * 16 * 2 and found.pair_products == 2 * 4 * 16


def test_layers_with_a_window_are_counted_apart(tmp_path: Path) -> None:
    found = sizes(tmp_path, SMALL | GEMMA)
    assert found.window == 24
    assert found.bytes_per_token == found.bytes_per_window_token == 2 * 2 * 2 * 16 * 2
    assert found.pair_products == found.window_pair_products == 2 * 2 * 4 * 16


def test_a_token_uses_some_of_the_experts(tmp_path: Path) -> None:
    found = sizes(tmp_path, SMALL | EXPERTS)
    experts = 4 * 8 * 3 * 64 * 32
    assert found.expert_bytes == 2 * experts and found.expert_share == 0.25
    assert found.weight_bytes == found.read_bytes + found.expert_bytes + 2 * (1000 * 64 + 64)  # embedding, last norm
    assert found.body_parameters == found.read_bytes // 2 - 1000 * 64 + experts // 4
    assert found.weights_read(1) == found.read_bytes + 0.25 * found.expert_bytes
    assert found.weights_read(2) == found.read_bytes + (1 - 0.75**2) * found.expert_bytes


def test_folders_that_cannot_be_sized_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match=r"--model .* has no config\.json"):
        read_model_sizes(tmp_path)
    with pytest.raises(CostError, match=r"only models that Baton's own code computes .* PhiForCausalLM is not"):
        sizes(tmp_path, SMALL | {"architectures": ["PhiForCausalLM"]})
