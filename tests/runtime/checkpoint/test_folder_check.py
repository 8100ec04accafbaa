"""What a server says of a wrong folder before it starts processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.runtime.checkpoint.folder_check import check_folder
from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.config import ModelArgs

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": 4, "intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
TENSORS = {
    "model.embed_tokens.weight": (9, 4),
    "model.layers.0.input_layernorm.weight": (4,),
    "model.layers.1.input_layernorm.weight": (4,),
    "lm_head.weight": (9, 4),
}


def check(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]], **args: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, folder / "model.safetensors")
    check_folder(folder, ModelArgs(model_path=str(folder), **args))


def test_right_folder_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    check(tmp_path, CONFIG, TENSORS)
    assert not caplog.records


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"vocab_size": 10}, {}, r"vocab_size 10 and hidden_size 4, but model\.embed_tokens\.weight .* \[9, 4\]"),
        ({"num_hidden_layers": 1}, {}, r"num_hidden_layers 1, but of the weights in \S+ they have 2 layers"),
        ({"num_hidden_layers": 4}, {}, r"num_hidden_layers 4, but of the weights in \S+ layer 2 is missing"),
        ({}, {"lm_head.weight": None}, r"no lm_head\.weight, .* set tie_word_embeddings to true"),
        ({"architectures": ["NewForCausalLM"]}, {}, "architecture NewForCausalLM is not supported"),
    ],
)
def test_config_that_contradicts_the_weights(tmp_path: Path, config: Any, tensors: Any, message: str) -> None:
    changed = {name: shape for name, shape in (TENSORS | tensors).items() if shape is not None}
    with pytest.raises(ModelLoadError, match=message):
        check(tmp_path, CONFIG | config, changed, model_impl="baton")


def test_layers_beyond_the_last_may_predict_further_tokens(tmp_path: Path) -> None:
    check(tmp_path, CONFIG | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}, TENSORS)


def test_other_implementations_and_dummy_weights_are_checked_less(tmp_path: Path) -> None:
    check(tmp_path, CONFIG | {"architectures": ["NewForCausalLM"]}, TENSORS)
    (tmp_path / "model.safetensors").write_bytes(b"")
    check_folder(tmp_path, ModelArgs(model_path=str(tmp_path), load_format="dummy"))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read"):
        check_folder(tmp_path, ModelArgs(model_path=str(tmp_path)))


def test_text_part_of_a_multimodal_model_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}, "tie_word_embeddings": False}
    config |= {"text_config": CONFIG | {"model_type": "llama"}}
    tensors = {f"language_model.{name}": shape for name, shape in TENSORS.items()}
    check(tmp_path, config, tensors | {"vision_tower.x": (1,)})
    assert "LlavaForConditionalGeneration: the text part alone is served; requests with pictures" in caplog.text
    with pytest.raises(ModelLoadError, match=r"but language_model\.model\.embed_tokens\.weight in model\.safetensors"):
        check(tmp_path, config, tensors | {"language_model.model.embed_tokens.weight": (8, 4)})


@pytest.mark.parametrize("change", [lambda file: file.unlink(), lambda file: file.write_text("{broken")])
def test_missing_and_broken_config(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    check(tmp_path, CONFIG, TENSORS)
    change(tmp_path / "config.json")
    with pytest.raises(ModelLoadError, match=r"has no config\.json|config\.json is not valid JSON"):
        check_folder(tmp_path, ModelArgs(model_path=str(tmp_path)))


def test_check_does_not_import_torch() -> None:
    code = "import sys, baton.runtime.checkpoint.folder_check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
