"""Plain serving on this machine, ours and transformers side by side: decode and prefill throughput of one static batch.

    python -m benchmarks.serving.offline [--model FOLDER] [--batch-sizes 1 8 32] [--prompt-lens 128 1024] [--rounds 5]
    python -m benchmarks.serving.offline --gpu [--batch-sizes 1 16 64] [--profile]

With --gpu: ours alone, on a GPU; see gpu_offline.py. Everything below is about the run on this machine's CPU.

Without --model: a 40.0 M-parameter Llama with random weights (hidden 512, 8 layers, 8 heads, 4 KV heads, intermediate
1408, vocabulary 32000, tied), float32. Both sides get the same weights, prompts and greedy steps. Every round runs all
cases, ours first in one round and last in the next; a case's figure is the median step of the median round. Ours goes
through the model runner with the real row pool and allocator, argmax for sampling; no HTTP, no scheduler. Prints a
table, writes benchmarks/results/offline.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from baton.runtime.config import ModelArgs
from benchmarks.common.gpu_run import add_gpu_arguments, check_device
from benchmarks.common.measured import RESULTS
from benchmarks.common.models import LLAMA_40M, save_random_model
from benchmarks.serving.gpu_offline import run_gpu_offline
from benchmarks.serving.static_batch import StaticBatch

GOALS = {("decode", 1, 128): 85, ("decode", 8, 128): 300, ("decode", 32, 128): 600, ("prefill", 1, 1024): 3000}
"""tokens/s of the 40 M model on two cores."""


class Transformers:
    """The same steps through transformers, with its KV cache and sdpa attention."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def start(self, prompts: np.ndarray) -> np.ndarray:
        self.cache = None
        return self._forward(prompts)

    def decode(self, ids: np.ndarray) -> np.ndarray:
        return self._forward(ids[:, None])

    @torch.inference_mode()
    def _forward(self, ids: np.ndarray) -> np.ndarray:
        output = self.model(
            torch.from_numpy(ids.astype(np.int64)), past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self.cache = output.past_key_values
        return output.logits[:, -1].argmax(-1).numpy().astype(np.int32)


def ours(folder: str, num_rows: int, context: int) -> StaticBatch:
    args = ModelArgs(model_path=folder, dtype="float32", device="cpu")
    return StaticBatch(args, num_rows=num_rows, context=context, max_prefill=num_rows * context)


@dataclass
class Case:
    """One line of the table. Figures in tokens/s, one per round."""

    kind: str
    batch_size: int
    prompt_len: int
    ours: list[float] = field(default_factory=list)
    transformers: list[float] = field(default_factory=list)
    agree: float = 1.0
    """Share of generated tokens that are equal on both sides, up to each sequence's first difference."""

    @property
    def goal(self) -> int | None:
        return GOALS.get((self.kind, self.batch_size, self.prompt_len))


Clock = Callable[[], float]


def run_decode(
    engine: StaticBatch | Transformers, prompts: np.ndarray, steps: int, clock: Clock
) -> tuple[float, np.ndarray]:
    """-> (median seconds per step, generated ids [bs, steps + 1])"""
    ids, times = [engine.start(prompts)], []
    for _ in range(steps):
        began = clock()
        ids.append(engine.decode(ids[-1]))
        times.append(clock() - began)
    return median(times), np.stack(ids, axis=1)


def run_prefill(
    engine: StaticBatch | Transformers, prompts: np.ndarray, repeats: int, clock: Clock
) -> tuple[float, np.ndarray]:
    """-> (median seconds, next ids [1, 1])"""
    times, ids = [], engine.start(prompts)
    for _ in range(repeats):
        began = clock()
        ids = engine.start(prompts)
        times.append(clock() - began)
    return median(times), ids[:, None]


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Random weights leave ties that rounding decides; after the first difference two sequences are different texts."""
    equal = np.logical_and.accumulate(a == b, axis=1)
    return float(equal.mean())


def measure(cases: list[Case], engines: dict[str, Any], args: argparse.Namespace, vocab_size: int) -> None:
    clock = time.thread_time if args.cpu_time else time.perf_counter
    rng = np.random.default_rng(args.seed)
    for round_number in range(args.rounds):
        names = list(engines) if round_number % 2 == 0 else list(engines)[::-1]
        for case in cases:
            prompts = rng.integers(0, vocab_size, (case.batch_size, case.prompt_len)).astype(np.int32)
            generated = {}
            for name in names:
                run: Callable[..., tuple[float, np.ndarray]] = run_decode if case.kind == "decode" else run_prefill
                repeats = args.steps if case.kind == "decode" else 3
                seconds, generated[name] = run(engines[name], prompts, repeats, clock)
                tokens = case.batch_size * (1 if case.kind == "decode" else case.prompt_len)
                getattr(case, name).append(tokens / seconds)
            if len(generated) == 2:
                case.agree = min(case.agree, agreement(generated["ours"], generated["transformers"]))


def print_table(cases: list[Case]) -> None:
    print(f"\n{'tokens/s':<22}{'ours':>9}{'transformers':>14}{'ratio':>8}{'goal':>8}{'equal':>8}")
    for case in cases:
        ours, theirs = median(case.ours), median(case.transformers) if case.transformers else None
        print(
            f"{case.kind:<8}{case.batch_size:>4} × {case.prompt_len:<7}{ours:>9.0f}"
            + (f"{theirs:>14.0f}{ours / theirs:>8.2f}" if theirs else f"{'-':>14}{'-':>8}")
            + (f"{case.goal:>8}" if case.goal else f"{'-':>8}")
            + (f"{case.agree:>8.0%}" if theirs else f"{'-':>8}")
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder of a Llama, Mistral or Qwen model")
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="default: 1 8 32; with --gpu 1 16 64")
    parser.add_argument("--prompt-lens", type=int, nargs="+", help="for decode; default: 128 1024; with --gpu 1024")
    parser.add_argument("--prefill-lens", type=int, nargs="*", default=[1024])
    parser.add_argument("--steps", type=int, help="decode steps per round; default: 32; with --gpu 64")
    parser.add_argument("--rounds", type=int, help="default: 5; with --gpu 3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", choices=["ours", "transformers"], help="leave the other side out")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the thread's CPU time instead of wall time: for a machine that has other work; needs --threads 1",
    )
    add_gpu_arguments(parser)
    parser.add_argument("--plot", action="store_true", help="with --gpu --profile: also a picture of it")
    args = parser.parse_args()
    args.batch_sizes = args.batch_sizes or ([1, 16, 64] if args.gpu else [1, 8, 32])
    args.prompt_lens = args.prompt_lens or ([1024] if args.gpu else [128, 1024])
    args.steps = args.steps or (64 if args.gpu else 32)
    args.rounds = args.rounds or (3 if args.gpu else 5)
    if args.gpu:
        check_device(args, parser)
    elif args.cpu_time and args.threads != 1:
        parser.error("--cpu-time sees one thread only; add --threads 1")
    return args


def run_cases(args: argparse.Namespace) -> list[Case]:
    """Make the model and both engines, and measure every case."""
    cases = [Case("decode", size, length) for length in args.prompt_lens for size in args.batch_sizes]
    cases += [Case("prefill", 1, length) for length in args.prefill_lens]
    context = max(case.prompt_len for case in cases) + args.steps + 1
    with tempfile.TemporaryDirectory() as made:
        folder = args.model or made
        if not args.model:
            save_random_model(Path(made), LLAMA_40M)
        makers: dict[str, Callable[[], StaticBatch | Transformers]] = {
            "ours": lambda: ours(folder, max(args.batch_sizes), context),
            "transformers": lambda: Transformers(folder),
        }
        engines = {name: make() for name, make in makers.items() if args.only in (None, name)}
        vocab_size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
        measure(cases, engines, args, vocab_size)
    return cases


def write_json(cases: list[Case], args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    machine = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    report = {**machine, **settings, "cases": [asdict(case) | {"goal": case.goal} for case in cases]}
    (args.out / "offline.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    args = parse_arguments()
    if args.gpu:
        run_gpu_offline(args)
        return
    torch.set_num_threads(args.threads)
    cases = run_cases(args)
    print_table(cases)
    write_json(cases, args)


if __name__ == "__main__":
    main()
