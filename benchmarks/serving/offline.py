"""Measures the model runner alone on this machine: decodes and prefill of one static batch.

    python -m benchmarks.serving.offline [--model FOLDER] [--batch-sizes 1 8 32] [--prompt-lens 128 1024] [--rounds 5]
    python -m benchmarks.serving.offline --gpu [--batch-sizes 1 16 64] [--profile]

With --gpu: on a GPU; see gpu_offline.py. Everything below is about the run on this machine's CPU.

Without --model: a 40.0 M-parameter Llama of random weights (hidden 512, 8 layers, 8 heads, 4 KV heads, intermediate
1408, vocabulary 32000, tied), float32. Greedy steps through the model runner with the real row pool and allocator; no
HTTP, no scheduler: compare with the steps of `benchmarks.peers` to see what these add, and how other engines perform. A
case's figure is the median step of the median round. Prints a table, writes benchmarks/results/offline.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch

from baton.runtime.config import ModelArgs
from benchmarks.common.clock import add_cpu_time, check_cpu_time, clock_of
from benchmarks.common.gpu_run import add_gpu_arguments, check_gpu_arguments
from benchmarks.common.measured import RESULTS
from benchmarks.common.models import LLAMA_40M, write_dummy_model
from benchmarks.serving.gpu_offline import run_gpu_offline
from benchmarks.serving.static_batch import StaticBatch


@dataclass
class Case:
    """One line of the table. Figures in tokens/s, one per round."""

    kind: str
    batch_size: int
    prompt_len: int
    tokens_per_s: list[float] = field(default_factory=list)


Clock = Callable[[], float]


def decode_seconds(batch: StaticBatch, prompts: np.ndarray, steps: int, clock: Clock) -> float:
    """Median of a step."""
    ids, times = batch.start(prompts), []
    for _ in range(steps):
        began = clock()
        ids = batch.decode(ids)
        times.append(clock() - began)
    return median(times)


def prefill_seconds(batch: StaticBatch, prompts: np.ndarray, repeats: int, clock: Clock) -> float:
    """Median, after one that is not timed."""
    times = []
    batch.start(prompts)
    for _ in range(repeats):
        began = clock()
        batch.start(prompts)
        times.append(clock() - began)
    return median(times)


def measure(cases: list[Case], batch: StaticBatch, args: argparse.Namespace, vocab_size: int) -> None:
    clock = clock_of(args)
    rng = np.random.default_rng(args.seed)
    for _ in range(args.rounds):
        for case in cases:
            prompts = rng.integers(0, vocab_size, (case.batch_size, case.prompt_len)).astype(np.int32)
            if case.kind == "decode":
                tokens, seconds = case.batch_size, decode_seconds(batch, prompts, args.steps, clock)
            else:
                tokens, seconds = case.batch_size * case.prompt_len, prefill_seconds(batch, prompts, 3, clock)
            case.tokens_per_s.append(tokens / seconds)


def print_table(cases: list[Case]) -> None:
    print(f"\n{'':<22}{'tokens/s':>10}{'ms per step':>13}")
    for case in cases:
        rate = median(case.tokens_per_s)
        step = f"{1e3 * case.batch_size / rate:>13.2f}" if case.kind == "decode" else f"{'-':>13}"
        print(f"{case.kind:<8}{case.batch_size:>4} × {case.prompt_len:<7}{rate:>10.0f}{step}")


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
    add_cpu_time(parser)
    add_gpu_arguments(parser)
    parser.add_argument("--plot", action="store_true", help="with --gpu --profile: also a picture of it")
    args = parser.parse_args()
    args.batch_sizes = args.batch_sizes or ([1, 16, 64] if args.gpu else [1, 8, 32])
    args.prompt_lens = args.prompt_lens or ([1024] if args.gpu else [128, 1024])
    args.steps = args.steps or (64 if args.gpu else 32)
    args.rounds = args.rounds or (3 if args.gpu else 5)
    check_gpu_arguments(args, parser, only_with=["plot"], never_with=["model", "prefill_lens", "threads", "cpu_time"])
    check_cpu_time(parser, args)
    return args


def run_cases(args: argparse.Namespace) -> list[Case]:
    """Make the model, and measure every case."""
    cases = [Case("decode", size, length) for length in args.prompt_lens for size in args.batch_sizes]
    cases += [Case("prefill", 1, length) for length in args.prefill_lens]
    context, rows = max(case.prompt_len for case in cases) + args.steps + 1, max(args.batch_sizes)
    with tempfile.TemporaryDirectory() as made:
        if not args.model:
            write_dummy_model(Path(made), LLAMA_40M)
        folder, load_format = (args.model, "auto") if args.model else (made, "dummy")
        settings = ModelArgs(model_path=folder, load_format=load_format, dtype="float32", device="cpu")
        batch = StaticBatch(settings, num_rows=rows, context=context, max_prefill=rows * context)
        vocab_size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
        measure(cases, batch, args, vocab_size)
    return cases


def write_json(cases: list[Case], args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    machine = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    report = {**machine, **settings, "cases": [asdict(case) for case in cases]}
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
