"""What a worker makes of what it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.config import ModelArgs, WorkerConfig
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.worker import build_worker
from baton.scheduler.config import SchedulerConfig

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("asked", "found", "mixes"),
    [
        ({}, 256, True),
        ({}, 2048, False),
        ({"chunked_prefill_size": 64}, 256, False),
        ({"enable_mixed_chunk": True}, 2048, True),
    ],
)
def test_small_chunks_chosen_by_trial_enable_mixed_steps(
    asked: dict[str, Any], found: int, mixes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else requests that are decoding would wait for many of them."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(ModelRunner, "_choose_chunk", lambda self, backends: found)
    model = ModelArgs(model_path=str(tmp_path), load_format="dummy", device="cpu")
    worker = build_worker(WorkerConfig(model=model, scheduler=SchedulerConfig(max_total_tokens=256, **asked)))
    scheduler = worker.info["scheduler"]
    assert scheduler["chunked_prefill_size"] == asked.get("chunked_prefill_size", found)
    assert scheduler["enable_mixed_chunk"] is mixes
