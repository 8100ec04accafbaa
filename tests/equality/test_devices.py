"""Whole workers on a device, nothing doubled: on a GPU every kernel, copy and wait is the real one. The same runs on a
CPU, so that the test itself is tested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.scheduler.request_spec import ContinuationSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import Answer, LocalWorker
from tests.doubles.mixed_requests import assert_same_answers, mixed_requests, some_items
from tests.doubles.specs import make_spec

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SEED = 23

HALF = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1800,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""What FlashInfer has kernels for."""


def tokens(answer: Answer) -> list[list[int]]:
    """Output ids; for a beam search, those of each result."""
    return [answer.tokens] if answer.beams is None else [found.ids.tolist() for found in answer.beams.results]


@DEVICES
def test_overlapped_loop_equals_plain_loop_on_the_device(device: str) -> None:
    """In float32, so that nothing hangs on rounding; a GPU agrees with a CPU, but for a near tie here and there."""
    items = some_items(SEED)
    answers = []
    for where, overlap in (("cpu", False), (device, False), (device, True)):
        worker = LocalWorker(TOY, overlap=overlap, model_options={"device": where, "dtype": "float32"})
        answers.append(worker.run(mixed_requests(SEED), items=items))
    cpu, plain, overlapped = answers
    assert_same_answers(mixed_requests(SEED), plain, overlapped)
    equal = [tokens(one) == tokens(other) for one, other in zip(cpu, plain, strict=True)]
    assert sum(equal) >= 0.9 * len(equal), [i for i, same in enumerate(equal) if not same]


@DEVICES
@pytest.mark.parametrize("page_size", [1, 16])
def test_half_precision_with_device_backends(device: str, page_size: int, tmp_path: Path) -> None:
    """FlashInfer and graphs on a GPU. Each request is continued by a search; the second time prompts are cached."""
    (tmp_path / "config.json").write_text(json.dumps(HALF))
    options: dict[str, Any] = {"device": device, "dtype": "bfloat16", "load_format": "dummy"}
    worker = LocalWorker(
        tmp_path, overlap=True, model_options=options, page_size=page_size, max_total_tokens=16384, context_length=1024
    )
    if device == "cuda":
        assert worker.info["attention_backend"] == "flashinfer" and worker.info["cuda_graphs"]
    rng = np.random.default_rng(SEED)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    search = SamplingParams(beam_width=32, n=32, max_new_tokens=3, ignore_eos=True)
    prompts = [rng.integers(0, 1800, length).astype(np.int32) for length in (5, 64, 301, 700)]
    for turn in range(2):
        firsts = [make_spec(f"p{turn}{i}", ids, greedy, retain_ttl=100.0) for i, ids in enumerate(prompts)]
        answers = worker.run(firsts)
        assert all(len(answer.tokens) == 24 for answer in answers)
        suffix = np.array([7, 8, 9, 10], dtype=np.int32)
        seconds = [
            make_spec(f"c{turn}{i}", suffix, search, continuation=ContinuationSpec(f"p{turn}{i}"))
            for i in range(len(prompts))
        ]
        for answer in worker.run(seconds):
            assert answer.beams is not None and len(answer.beams.results) == 32
            scores = [found.score for found in answer.beams.results]
            assert np.isfinite(scores).all() and scores == sorted(scores, reverse=True)
            assert answer.inheritance is not None and answer.inheritance.path == "handoff"
            assert answer.inheritance.recomputed_tokens <= 1
