from __future__ import annotations

import pytest

from baton.runtime.checkpoint.tensor_names import ignored_reason, text_tensor_name


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),  # Gemma 3, LLaVA
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),  # Qwen3-VL
        ("model.language_model.model.norm.weight", "model.norm.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),  # SmolVLM
        ("thinker.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),  # Qwen2.5-Omni
        ("lm_head.weight", "lm_head.weight"),
        ("visual.blocks.0.attn.qkv.weight", None),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("vision_tower.transformer.layers.0.attention.q_proj.weight", None),
        ("model.multi_modal_projector.linear_1.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
        ("thinker.audio_tower.conv1.weight", None),
        ("talker.model.layers.0.mlp.up_proj.weight", None),
        ("image_newline", None),
        ("model.visualiser.weight", "model.visualiser.weight"),
    ],
)
def test_names_of_the_text_part(stored: str, expected: str | None) -> None:
    assert text_tensor_name(stored) == expected


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", {}),
        ("model.rotary_emb.inv_freq", {}),
        ("transformer.h.0.attn.masked_bias", {}),
        ("transformer.h.0.attn.bias", {"architectures": ["GPT2LMHeadModel"]}),
        ("lm_head.weight", {}),
        ("mtp.layers.0.mlp.up_proj.weight", {}),
        ("model.mtp_block.0.mlp.up_proj.weight", {}),
        ("model.layers.4.eh_proj.weight", {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}),
    ],
)
def test_harmless_tensors_have_a_reason(name: str, config: dict) -> None:
    assert ignored_reason(name, config)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("model.layers.0.self_attn.q_proj.bias", {}),
        ("model.layers.0.attn.bias", {"architectures": ["LlamaForCausalLM"]}),
        ("model.layers.4.mlp.up_proj.weight", {"num_hidden_layers": 4}),
        ("model.layers.5.eh_proj.weight", {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}),
        ("model.layers.3.eh_proj.weight", {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}),
        ("score.weight", {}),
    ],
)
def test_other_tensors_are_surplus(name: str, config: dict) -> None:
    assert ignored_reason(name, config) is None
