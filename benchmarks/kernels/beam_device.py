"""Measures a beam search's own work on the device: ranking, and attention over a shared prefix.

    python -m benchmarks.kernels.beam_device --threads 1

Prints the best of --repeat runs in milliseconds of CPU time: ranking compared with log_softmax and one flat topk, and
one layer of the 40 M Llama with the prefix of each search read once, compared with a tile for each beam. The results
must agree.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from baton.attention.backend import AttentionBatch, AttentionSpec, SharedPrefix
from baton.attention.torch_native import TorchNativeBackend
from baton.memory_pool.kv_pool import MHAKVPool, uniform_shapes
from baton.runtime.sampling.beam_candidates import BeamRanker
from baton.runtime.sampling.sequences import SequenceState
from baton.scheduler.batch import BeamStep, SequenceInfo
from baton.scheduler.constraints.constraint import AllowedTokens
from baton.scheduler.sampling_params import SamplingParams

RANKED = [(1, 4, 32_000), (1, 32, 32_000), (1, 32, 152_000), (16, 32, 32_000), (1, 512, 32_000)]
"""searches, beams of each, vocabulary"""
ATTENDED = [(1, 32, 700, 3), (16, 32, 700, 3), (1, 512, 700, 3), (1, 4, 700, 3), (1, 32, 32, 3), (1, 32, 16, 3)]
"""searches, beams of each, shared prefix, own tail"""
SPEC = AttentionSpec(layer_id=0, num_heads=8, num_kv_heads=4, head_dim=64, scale=0.125)
CHILDREN = 16
"""Number of children of each node of the trie."""


def best_of(repeat: int, run: Callable[[], object]) -> float:
    """Milliseconds of CPU time of the fastest run, after one to warm up."""
    run()
    times = []
    for _ in range(repeat):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def make_steps(
    searches: int, width: int, vocab_size: int, *, with_trie: bool
) -> tuple[list[BeamStep], list[SequenceState]]:
    rng = np.random.default_rng(0)
    sampling = SamplingParams(beam_width=width, n=width)
    nothing = np.empty(0, dtype=np.int32)
    info = SequenceInfo(0, sampling, seed=0, logprobs=None, eos_ends=True, prompt_ids=nothing)
    tokens = [np.sort(rng.choice(vocab_size, CHILDREN, replace=False)) for _ in range(width)]
    rows = np.repeat(np.arange(width, dtype=np.int32), CHILDREN)
    allowed = AllowedTokens.pack(rows, np.concatenate(tokens).astype(np.int32)) if with_trie else None
    scores = -rng.random(width).astype(np.float32)
    steps = [BeamStep(0, i * width, (i + 1) * width, 2 * width, scores, allowed=allowed) for i in range(searches)]
    return steps, [SequenceState(info)] * searches


def rank_times(searches: int, width: int, vocab_size: int, repeat: int) -> list[float]:
    """[ours, ours with a trie, log_softmax and a flat topk]"""
    logits = 3 * torch.randn(searches * width, vocab_size, generator=torch.Generator().manual_seed(0))
    ranker = BeamRanker(vocab_size, (2,), "cpu")
    steps, sequences = make_steps(searches, width, vocab_size, with_trie=False)
    with_trie, _ = make_steps(searches, width, vocab_size, with_trie=True)

    def flat() -> list[torch.Tensor]:
        found = []
        for step in steps:
            logprobs = logits[step.start : step.stop].log_softmax(-1) + torch.from_numpy(step.scores)[:, None]
            found.append(logprobs.view(-1).topk(step.num_candidates).values)
        return found

    for candidates, expected in zip(ranker.rank(logits, steps, sequences), flat()):
        torch.testing.assert_close(torch.from_numpy(candidates.scores), expected, atol=1e-5, rtol=1e-5)
    runs = [lambda: ranker.rank(logits, steps, sequences), lambda: ranker.rank(logits, with_trie, sequences), flat]
    return [best_of(repeat, run) for run in runs]


def attention_times(searches: int, width: int, prefix: int, tail: int, repeat: int) -> list[float]:
    """[prefix read once, a tile for each beam] of one layer."""
    beams, length = searches * width, prefix + tail
    count = searches * prefix + beams * tail
    pool = MHAKVPool(
        num_tokens=count,
        page_size=1,
        shapes=uniform_shapes(1, SPEC.num_kv_heads, SPEC.head_dim),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    slots = np.random.default_rng(0).permutation(count).astype(np.int32) + 1
    table = np.empty((searches, width, length), dtype=np.int32)
    table[:, :, :prefix] = slots[: searches * prefix].reshape(searches, 1, prefix)
    table[:, :, prefix:] = slots[searches * prefix :].reshape(searches, width, tail)
    req_to_token = torch.from_numpy(table.reshape(beams, length))
    pool.k[0].normal_()
    pool.v[0].normal_()
    q = torch.randn(beams, SPEC.num_heads, SPEC.head_dim)
    groups = [SharedPrefix(i * width, width, prefix) for i in range(searches)]
    times, results = [], []
    for shared in (groups, []):
        backend = TorchNativeBackend(pool)
        backend.plan(
            AttentionBatch(
                req_to_token=req_to_token,
                host_rows=np.arange(beams, dtype=np.int32),
                prefix_lens=np.full(beams, length - 1, dtype=np.int32),
                extend_lens=np.ones(beams, dtype=np.int32),
                pad_row=0,
                shared=shared,
            )
        )
        results.append(backend.run(SPEC, q))
        times.append(best_of(repeat, lambda backend=backend: backend.run(SPEC, q)))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        print(f"{'candidates, searches × beams × vocabulary':44s}{'ours':>10s}{'trie':>10s}{'flat topk':>12s}")
        for searches, width, vocab_size in RANKED:
            ours, trie, flat = rank_times(searches, width, vocab_size, args.repeat)
            print(f"{f'{searches} × {width} × {vocab_size}':44s}{ours:10.2f}{trie:10.2f}{flat:12.2f}")
        print(f"\n{'attention, searches × beams, prefix + tail':44s}{'ours':>10s}{'tiles':>10s}")
        for searches, width, prefix, tail in ATTENDED:
            shared, tiles = attention_times(searches, width, prefix, tail, args.repeat)
            print(f"{f'{searches} × {width}, {prefix} + {tail}':44s}{shared:10.2f}{tiles:10.2f}")


if __name__ == "__main__":
    main()
