"""What a worker makes of what it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.runtime.config import ModelArgs, TierConfig, WorkerConfig
from baton.runtime.pool_sizes import PoolSizes
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.worker import build_worker, pool_sizes
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


LAYERS = {"num_hidden_layers": 4, "max_position_embeddings": 256}
HALF_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
GEMMA = {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 16, **LAYERS, **HALF_WINDOWS}
LFM2 = {"architectures": ["Lfm2ForCausalLM"], "norm_eps": 1e-5, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
LFM2 |= {"layer_types": ["conv", "full_attention", "conv", "conv"], **LAYERS}
TOKEN = 2 * 16 * 4
"""Bytes of K and V of a token in a layer."""


@pytest.mark.parametrize(
    ("model", "host_ratio", "sizes"),
    [
        ({}, 0.0, PoolSizes(tokens=512, page_size=16, bytes_per_token=TOKEN)),
        (
            GEMMA,
            0.0,
            PoolSizes(
                tokens=512,
                page_size=16,
                bytes_per_token=2 * TOKEN,
                window=24,
                window_tokens=256,
                bytes_per_window_token=2 * TOKEN,
            ),
        ),
        (
            GEMMA,
            2.0,
            PoolSizes(tokens=512, page_size=16, bytes_per_token=4 * TOKEN, host_tokens=1024),
        ),
        (
            LFM2,
            2.0,
            PoolSizes(
                tokens=512,
                page_size=16,
                bytes_per_token=TOKEN,
                states=9,
                bytes_per_state=3 * 2 * 32 * 4,
                host_tokens=1024,
                host_states=18,
            ),
        ),
    ],
)
def test_pool_sizes(model: dict[str, Any], host_ratio: float, sizes: PoolSizes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | model))
    args = ModelArgs(model_path=str(tmp_path), load_format="dummy", device="cpu", dtype="float32")
    asked = SchedulerConfig(
        max_total_tokens=512, page_size=16, max_states=9, chunked_prefill_size=64, swa_full_tokens_ratio=0.5
    )
    worker = build_worker(WorkerConfig(model=args, scheduler=asked, tiers=TierConfig(host_cache_ratio=host_ratio)))
    assert pool_sizes(worker) == sizes
