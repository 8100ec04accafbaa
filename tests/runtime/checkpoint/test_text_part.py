"""The text part of multimodal configs, against transformers' modelling of the whole model on text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.runtime.checkpoint.hf_config import parse_model_config
from baton.runtime.checkpoint.text_part import DECODERS, DEFAULTS, multimodal_name, text_part
from baton.runtime.config import ModelArgs
from baton.runtime.models.registry import ARCHITECTURES
from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.forced_options import FORCED
from tests.doubles.model_driver import ModelDriver
from tests.doubles.tiny_models import TINY

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 48, "intermediate_size": 16}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def test_text_models_have_no_other_part() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
    assert text_part(config) is None and multimodal_name(config) is None


def test_unknown_text_part_is_left_to_other_implementations() -> None:
    config = {"architectures": ["NewForVision"], "text_config": {"model_type": "new"}, "vision_config": {}}
    assert text_part(config) is None and multimodal_name(config) == "NewForVision"


def test_every_decoder_is_served() -> None:
    assert set(DECODERS.values()) <= set(ARCHITECTURES)


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[model_type]().to_dict()
    assert DEFAULTS[model_type] == {key: theirs[key] for key in DEFAULTS[model_type]}


def test_real_gemma3_config_is_read() -> None:
    """With the keys of the 4B release, which leaves out what transformers assumes."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
        "model_type": "gemma3", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"},
    }  # fmt: skip
    assert multimodal_name(config) == "Gemma3ForConditionalGeneration"
    found = parse_model_config(config)
    assert (found.architecture, found.num_heads, found.head_dim, found.vocab_size) == (
        "Gemma3ForCausalLM",
        8,
        256,
        262208,
    )
    assert found.tie_word_embeddings and found.eos_token_ids == (1, 106) and found.dtype == "bfloat16"


def test_flat_config_of_older_qwen_files() -> None:
    config = {
        **{key: value for key, value in TINY.items() if value is not None},
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {},
        "tie_word_embeddings": True,
    }  # fmt: skip
    found = parse_model_config(config)
    assert found.architecture == "Qwen2ForCausalLM" and found.tie_word_embeddings
    assert found.ropes[0] is not None and (found.ropes[0].rope_type, found.ropes[0].theta) == ("default", 1e6)


MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3": ("gemma3_text", {"head_dim": 8, "sliding_window": 16}, {"model_type": "siglip_vision_model", **VISION}),
    "Llava": ("llama", {}, {"model_type": "clip_vision_model", **VISION}),
    "Mistral3": ("mistral", {"head_dim": 8}, {"model_type": "pixtral", **VISION}),
    "Qwen2_5_VL": ("qwen2_5_vl_text", {"rope_parameters": MROPE}, QWEN_VISION),
    "Qwen3VL": (
        "qwen3_vl_text",
        {"head_dim": 8, "rope_parameters": MROPE},
        QWEN_VISION | {"deepstack_visual_indexes": []},
    ),
}


@pytest.mark.equality
@pytest.mark.parametrize("name", MULTIMODAL)
@torch.no_grad()
def test_text_part_equals_the_whole_model_on_text(name: str, tmp_path: Path) -> None:
    import transformers

    kind, changes, vision = MULTIMODAL[name]
    torch.manual_seed(1)
    text = {"model_type": kind, **TINY, **changes}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    reference = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [f"{name}ForConditionalGeneration"]
    args = ModelArgs(model_path=str(tmp_path), device="cpu", model_impl="baton", **FORCED)
    runner = ModelRunner(args, context_length=0, num_rows=2, page_size=1, max_total_tokens=512)
    ids = np.random.default_rng(2).integers(0, 100, 40).astype(np.int32)
    driver = ModelDriver(runner)
    found = driver.step([(driver.open(ids), len(ids))]).logits[0]
    expected = reference(input_ids=torch.from_numpy(ids)[None].long()).logits[0, -1].float()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
