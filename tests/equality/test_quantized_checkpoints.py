"""The toy model's checkpoint in each format of few bits: its greedy tokens are those of transformers on the numbers
that the file stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.entrypoints.engine import Engine
from baton.runtime.checkpoint.folder_check import check_folder
from baton.runtime.config import ModelArgs
from tests.doubles.quantized_checkpoints import FORMATS, write_packed

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
NEW_TOKENS = 16
TIE = 1e-4
PROMPTS = [[5, 17, 300, 41, 9, 1001, 3], [1699, 88, 12, 12, 700, 60, 61, 62, 63, 1204, 15], list(range(40, 100))]

SLOW = [name for name in FORMATS if name not in ("gptq4-zeros", "awq64", "w4a16", "w8a8", "deepseek-fp8")]


@torch.inference_mode()
def assert_tokens_of_transformers(served: Path, widened: Path) -> None:
    """served: a folder for Baton; widened: the same numbers for transformers. A token may differ only where the two
    best logits of transformers are closer than TIE."""
    from transformers import AutoModelForCausalLM

    check_folder(served, ModelArgs(model_path=str(served)))
    model: Any = AutoModelForCausalLM.from_pretrained(widened, dtype=torch.float32)
    options = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    floats: Any = {"dtype": "float32", "kv_cache_dtype": "float32", "linear_backend": "torch"}
    with Engine(model_path=str(served), device="cpu", max_total_tokens=2048, **floats) as engine:
        for prompt in PROMPTS:
            tokens = engine.generate(input_ids=prompt, sampling_params=options)["output_ids"]
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            best = logits.log_softmax(-1).amax(dim=1)
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
            assert len(tokens) == NEW_TOKENS and bool((best - chosen < TIE).all()), (prompt, tokens)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else []) for n in FORMATS])
def test_packed_checkpoints(tmp_path, name):
    write_packed(TOY, tmp_path / "packed", tmp_path / "widened", FORMATS[name])
    assert_tokens_of_transformers(tmp_path / "packed", tmp_path / "widened")
