"""generation_config.json: which of its recommendations are used, and what is said of a broken one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.checkpoint.hf_config import load_generation_config, load_model_config, load_sampling_defaults
from baton.runtime.checkpoint.model_files import ModelLoadError


def written(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


def test_missing_generation_config_gives_no_defaults(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path) == {} and load_sampling_defaults(tmp_path) == {}


def test_its_recommendations_are_read(tmp_path: Path) -> None:
    content = {
        "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05,
        "max_new_tokens": 512, "do_sample": False, "eos_token_id": 7, "num_beams": 4, "transformers_version": "4.51.0",
    }  # fmt: skip
    assert load_sampling_defaults(written(tmp_path, content)) == {
        "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05, "max_new_tokens": 512,
    }  # fmt: skip


def test_null_and_unlimited_values_give_no_defaults(tmp_path: Path) -> None:
    content = {"temperature": None, "top_p": None, "top_k": 0, "temperature_last": True}
    assert load_sampling_defaults(written(tmp_path, content)) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", -7),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("max_new_tokens", -1),
    ],
)
def test_invalid_generation_config_value_is_named_with_its_file(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: {name} is .*--sampling-defaults openai"):
        load_sampling_defaults(written(tmp_path, {"temperature": 0.7, name: value}))


@pytest.mark.parametrize("content", ["{broken", "[1, 2]", "7", '"text"'])
def test_broken_generation_config_is_named(tmp_path: Path, content: str) -> None:
    folder = written(tmp_path, content)
    for load in (load_generation_config, load_sampling_defaults):
        with pytest.raises(ModelLoadError, match=r"generation_config\.json (cannot be read as|must hold a) JSON"):
            load(folder)


def test_broken_generation_config_fails_model_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json must hold a JSON object"):
        load_model_config(written(tmp_path, [1]))
