"""Measures a sampling step, and the conversion of tokens to text. No model: random logits with a few likely tokens.

    python -m benchmarks.kernels.sampler --vocab 32000 152000 --batch 1 32 --threads 1 [--device cuda]

Prints the best of --repeat runs, in milliseconds per step (sampler) and microseconds per token (text).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from baton.runtime.sampling.op_providers import select_sampling_ops
from baton.runtime.sampling.sampler import Sampler
from baton.runtime.sampling.sequences import SequenceState
from baton.runtime.text.incremental_decode import IncrementalDecoder
from baton.runtime.text.stop_strings import StopStringMatcher
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.batch import SequenceInfo
from baton.scheduler.sampling_params import SamplingParams
from benchmarks.common.models import TOY_MODEL

PROMPT_TOKENS = 500
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy, repetition_penalty 1.1": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    "temperature 1": SamplingParams(),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "top_k 50": SamplingParams(temperature=0.6, top_k=50),
    "top_k 50, top_p 0.95": SamplingParams(temperature=0.6, top_k=50, top_p=0.95),
    "top_p 0.95": SamplingParams(temperature=0.6, top_p=0.95),
}


def best_of(repeat: int, run: Callable[[], object]) -> float:
    """Seconds of the fastest run, after one to warm up."""
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def make_sequences(sampling: SamplingParams, batch: int, vocab_size: int) -> list[SequenceState]:
    rng = np.random.default_rng(0)
    sequences = []
    for serial in range(batch):
        prompt = rng.integers(0, vocab_size, PROMPT_TOKENS).astype(np.int32)
        counted = prompt if sampling.repetition_penalty != 1.0 else prompt[:0]
        info = SequenceInfo(serial, sampling, seed=serial, logprobs=None, eos_ends=True, prompt_ids=counted)
        sequences.append(SequenceState(info))
    return sequences


def _step(sampler: Sampler, logits: torch.Tensor, sequences: list[SequenceState]) -> None:
    sampler.sample(logits, sequences, np.zeros(len(sequences), dtype=np.int32)).ids.cpu()


def sampler_table(vocab_sizes: list[int], batches: list[int], repeat: int, device: torch.device) -> None:
    ops = {vocab_size: select_sampling_ops(device, vocab_size) for vocab_size in vocab_sizes}
    shapes = [(batch, vocab_size) for vocab_size in vocab_sizes for batch in batches]
    print(f"{'ms per step, batch × vocabulary':34s}" + "".join(f"{f'{b} × {v}':>14s}" for b, v in shapes))
    for name, sampling in CASES.items():
        cells = []
        for batch, vocab_size in shapes:
            generator = torch.Generator().manual_seed(0)
            logits = torch.randn(batch, vocab_size, generator=generator) * 2
            logits[:, :50] += 12 * torch.rand(batch, 50, generator=generator)
            sampler = Sampler(vocab_size, (2,), device, ops[vocab_size])
            sequences = make_sequences(sampling, batch, vocab_size)
            # The tokens are read, so that a GPU is waited for.
            step = partial(_step, sampler, logits.to(device), sequences)
            cells.append(1e3 * best_of(repeat, step))
        print(f"{name:34s}" + "".join(f"{cell:14.2f}" for cell in cells))


def text_table(repeat: int) -> None:
    tokenizer = Tokenizer.load(TOY_MODEL)
    token_bytes = tokenizer.token_bytes
    ids = tokenizer.encode("Count the lines of the file, then list what is in the folder. 你好\n" * 200)

    def decode() -> None:
        decoder = IncrementalDecoder(token_bytes, skip_special_tokens=True)
        for token_id in ids:
            decoder.push_ids((token_id,))

    def match() -> None:
        matcher = StopStringMatcher(token_bytes, ("</think>", "\nObservation:"))
        for token_id in ids:
            matcher.push_id(token_id)

    print(f"\nmicroseconds per token, {len(ids)} tokens one by one")
    print(f"{'incremental decode':34s}{1e6 * best_of(repeat, decode) / len(ids):14.2f}")
    print(f"{'with two stop strings':34s}{1e6 * best_of(repeat, match) / len(ids):14.2f}")
    print(f"\nloading the toy model's tokenizer: {1e3 * best_of(3, lambda: Tokenizer.load(TOY_MODEL)):.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 152_000])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sampler_table(args.vocab, args.batch, args.repeat, args.device)
    text_table(args.repeat)


if __name__ == "__main__":
    main()
