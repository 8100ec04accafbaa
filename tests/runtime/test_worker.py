"""What a worker makes of what it is asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from baton.runtime.config import ModelArgs, TierConfig, WorkerConfig
from baton.runtime.pool_sizes import PoolSizes
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.step_runner import StepOutput, StepRunner
from baton.runtime.worker import build_worker, pool_sizes, warm_up
from baton.scheduler.batch import ScheduleBatch
from baton.scheduler.config import SchedulerConfig
from tests.doubles.scheduler_harness import Harness
from tests.doubles.tier_rig import FakeBlocks

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


@dataclass
class Steps:
    """Computes steps in place of a step runner."""

    harness: Harness
    tokens: list[int] = field(default_factory=list)
    """Of each step."""

    def run(self, batch: ScheduleBatch) -> StepOutput:
        self.tokens.append(int((batch.seq_lens - batch.prefix_lens).sum()))
        return StepOutput(self.harness.model.forward(batch))


@pytest.mark.parametrize("generates", [True, False])
def test_warm_up_finds_and_leaves_nothing_on_other_tiers(generates: bool) -> None:
    """Not what an earlier server has left there, and no remote store is asked: the steps are to run."""
    blocks = FakeBlocks(), FakeBlocks()
    for harness in (make_tiers(blocks), make_tiers(blocks)):
        steps = Steps(harness)
        warm_up(harness.scheduler, cast(StepRunner, steps), generates=generates)
        assert steps.tokens == ([2, 1, 1] if generates else [2])
        assert harness.scheduler.is_idle and not harness.scheduler.take_transfer_orders(0.0)
        for number in (1, 2, 3):
            harness.add(f"r{number}", [0] * number, 8)
            harness.run()
        assert blocks[0].snapshots and blocks[1].snapshots


def make_tiers(blocks: tuple[FakeBlocks, FakeBlocks]) -> Harness:
    return Harness(states=8, host_tokens=512, host_states=8, block_tokens=16, blocks=blocks)


def test_warm_up_that_does_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_tiers((FakeBlocks(), FakeBlocks()))
    monkeypatch.setattr(harness.scheduler, "next_batch", lambda now: None)
    with pytest.raises(RuntimeError, match="did not end"):
        warm_up(harness.scheduler, cast(StepRunner, Steps(harness)))


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
