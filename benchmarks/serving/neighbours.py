"""Measures the slowdown of decoding by other processes on the cores.

    python -m benchmarks.serving.neighbours [--neighbours 0 1 2] [--batch-sizes 1 8] [--rounds 3] [--prompt-len 128]
                                            [--tokens 120] [--model FOLDER]

A neighbour is a process that keeps a core busy. Two engines take turns, the order swapped every round: one with watched
threads, as usual (`runtime/runner/cpu_threads.py`), and one with threads that always spin, as torch's do. Before every
case the machine is quiet for a second. A figure is the median over the rounds of the seconds for a whole batch, and its
ratio to the watched engine without neighbours. Without --model: the 40 M Llama, random weights. Prints a table, writes
neighbours.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.models import LLAMA_40M, write_dummy_model

WAYS = ("watched", "spinning")
SETTLE_S = 1.5


class Engine:
    """An engine in a process of its own, as its threads and its way of waiting belong to the whole process."""

    def __init__(self, way: str, settings: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "benchmarks.serving.neighbours", "--serve", way, json.dumps(settings)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def seconds(self, batch_size: int, prompt_len: int, tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([batch_size, prompt_len, tokens]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _answer(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with status {self._process.wait()}")
        return json.loads(line)


def serve(way: str, settings: dict[str, Any], lines: IO[str]) -> None:
    """The engine's process: for each line [batch size, prompt length, tokens], write the seconds."""
    from baton.entrypoints.engine import Engine as BatonEngine
    from baton.runtime import worker

    if way == "spinning":
        worker.watch_cpu_threads = lambda device: lambda now: None
    engine = BatonEngine(**settings)
    rng = np.random.default_rng(0)

    def run(batch_size: int, prompt_len: int, tokens: int) -> float:
        prompts = rng.integers(300, 500, (batch_size, prompt_len)).tolist()
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        began = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - began

    try:
        run(4, 64, 8)
        print(0.0, flush=True)
        for line in lines:
            print(run(*json.loads(line)), flush=True)
    finally:
        engine.shutdown()


@contextlib.contextmanager
def neighbours(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        time.sleep(0.2)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(args: argparse.Namespace, settings: dict[str, Any]) -> dict[tuple[str, int, int], list[float]]:
    """(way, batch size, neighbours) -> seconds, one per round."""
    found: dict[tuple[str, int, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        engines = {}
        for way in WAYS:
            engines[way] = Engine(way, settings)
            stack.callback(engines[way].close)
        cases = [(r, b, n) for r in range(args.rounds) for b in args.batch_sizes for n in args.neighbours]
        for round_number, batch_size, number in tqdm(cases, desc="Measuring", disable=None):
            for way in WAYS if round_number % 2 else reversed(WAYS):
                time.sleep(SETTLE_S)
                engines[way].seconds(batch_size, args.prompt_len, args.tokens)  # spins again, if it had stopped
                with neighbours(number):
                    seconds = engines[way].seconds(batch_size, args.prompt_len, args.tokens)
                found.setdefault((way, batch_size, number), []).append(seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], json.loads(args.serve[1]), sys.stdin)
        return
    with tempfile.TemporaryDirectory() as made:
        write_dummy_model(Path(made), LLAMA_40M)
        settings = {
            "model_path": args.model or made,
            "load_format": "auto" if args.model else "dummy",
            "dtype": "float32",
            "device": "cpu",
            "max_total_tokens": max(args.batch_sizes) * (args.prompt_len + args.tokens) + 4096,
            "log_level": "warning",
        }
        found = measure(args, settings)
    quiet = {b: median(found["watched", b, min(args.neighbours)]) for b in args.batch_sizes}
    print(f"{'batch':>5} {'neighbours':>10}" + "".join(f"{way + ', s':>14}{'ratio':>7}" for way in WAYS))
    for batch_size in args.batch_sizes:
        for number in args.neighbours:
            seconds = [median(found[way, batch_size, number]) for way in WAYS]
            cells = "".join(f"{s:14.2f}{s / quiet[batch_size]:7.2f}" for s in seconds)
            print(f"{batch_size:5} {number:10}{cells}")
    rows = [{"way": w, "batch_size": b, "neighbours": n, "seconds": s} for (w, b, n), s in found.items()]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "neighbours.json").write_text(json.dumps({**about_this_run("cpu"), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
