"""Random steps on two runners of the same model, one of which replays what it has captured."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.cpu_graphs import count_replays
from tests.doubles.model_driver import ModelDriver

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,  # as in other GPU tests, so that no more kernels are compiled
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


def compare(plain: ModelRunner, graphs: ModelRunner, page_size: int, *, steps: int = 40, atol: float) -> Counter:
    """Random steps on both: prompts, chunks, suffixes and decodes of changing sequences."""
    rng = np.random.default_rng(page_size)
    replays = count_replays(graphs)
    sides = [ModelDriver(runner, page_size=page_size) for runner in (plain, graphs)]
    open_sequences: list[list] = []
    for step in range(steps):
        if len(open_sequences) < 16 and rng.random() < 0.5:
            ids = rng.integers(0, CONFIG["vocab_size"], int(rng.integers(1, 120)))
            open_sequences.append([side.open(ids) for side in sides])
        members = [pair for pair in open_sequences if rng.random() < 0.8] or open_sequences[:1]
        if not members:
            continue
        counts = []
        for pair in members:
            left = len(pair[0].ids) - pair[0].computed
            if left == 0:
                more = rng.integers(0, CONFIG["vocab_size"], 1 if step % 3 else int(rng.integers(1, 9)))
                for sequence in pair:
                    sequence.ids = np.append(sequence.ids, more.astype(np.int32))
                left = len(more)
            counts.append(min(left, int(rng.integers(1, 60))))
        outputs = [side.step([(pair[i], n) for pair, n in zip(members, counts)]) for i, side in enumerate(sides)]
        torch.testing.assert_close(outputs[1].logits, outputs[0].logits, atol=atol, rtol=0.0)
        for pair in open_sequences:
            if len(pair[0].ids) > 250:
                for sequence, side in zip(pair, sides):
                    side.close(sequence)
        open_sequences = [pair for pair in open_sequences if len(pair[0].ids) <= 250]
    every = torch.arange(graphs.kv_pool.num_slots, device=graphs.device)
    assert graphs.kv_pool.first_not_finite(every) is None, "padding leaves nothing wild behind"
    pools = plain.kv_pool.layers, graphs.kv_pool.layers
    for pool, twin in zip(*((*layers.k, *layers.v) for layers in pools)):
        torch.testing.assert_close(twin[page_size:], pool[page_size:], atol=atol, rtol=0.0)
    return replays
