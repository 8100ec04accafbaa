"""Compares mixed steps (--enable-mixed-chunk) with plain ones: streams decode while prompts of one length arrive.

    python -m benchmarks.serving.mixed_steps [--prompt-lens 64 512 2048] [--streams 8] [--rounds 3] [--cpu-time]

Each of ``--streams`` requests generates ``--tokens`` tokens after a prompt of 128. After every ``--every`` tokens of
the slowest of them a prompt arrives, which generates 4 tokens. So the work is the same both ways, whatever the machine
is doing. The figures are tokens/s, counting generated tokens and computed prompt tokens, and the gap between two tokens
of a stream. Both ways run in one process on the same random weights, the order swapped every round; a figure is the
median of the rounds. Scheduler and step runner are the server's own, steps are waited for, there is no HTTP. Prints a
table, writes mixed_steps.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch

from baton.runtime.config import ModelArgs, WorkerConfig
from baton.runtime.worker import build_worker
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.token_buffer import pack_ids
from benchmarks.common.clock import add_cpu_time, check_cpu_time, clock_of
from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.models import SHAPES, write_dummy_model

STREAM_PROMPT, ANSWER = 128, 4
WAYS = ("plain", "mixed")


@dataclass
class Cell:
    """One way with prompts of one length. One figure per round."""

    way: str
    prompt_len: int
    tokens_per_s: list[float] = field(default_factory=list)
    gap_ms: list[dict[str, float]] = field(default_factory=list)
    """p50, p99 and max of the gaps between tokens of a stream."""
    first_token_ms: list[float] = field(default_factory=list)
    """Median of the prompts, from their arrival."""
    steps: list[int] = field(default_factory=list)

    def gap(self, name: str) -> float:
        return median(gaps[name] for gaps in self.gap_ms)


class Engine:
    """A scheduler and a step runner; its clients are this object."""

    def __init__(self, folder: Path, way: str, args: argparse.Namespace) -> None:
        longest = max(args.prompt_lens) + ANSWER
        config = SchedulerConfig(
            max_total_tokens=4 * longest + args.streams * (STREAM_PROMPT + args.tokens),
            max_running_requests=args.streams + 8,
            chunked_prefill_size=args.chunk,
            enable_mixed_chunk=way == "mixed",
        )
        model = ModelArgs(model_path=str(folder), load_format="dummy", dtype="float32", device="cpu")
        self._scheduler, self._step_runner, *_ = build_worker(WorkerConfig(model=model, scheduler=config))
        self._vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self._args = args
        self._clock = clock_of(args)

    def run(self, cell: Cell, seed: int) -> None:
        """Serve the streams and the prompts, and add the figures to the cell."""
        args, clock = self._args, self._clock
        rng = np.random.default_rng(seed)
        for number in range(args.streams):
            self._send(f"stream{number}", rng, STREAM_PROMPT, args.tokens)
        told: dict[str, list[float]] = {f"stream{number}": [] for number in range(args.streams)}
        sent: dict[str, float] = {}
        began, steps = clock(), 0
        while not self._scheduler.is_idle:
            slowest = min(len(times) for name, times in told.items() if name not in sent)
            if len(sent) < min(slowest, args.tokens - 1) // args.every:
                rid = f"prompt{len(sent)}"
                sent[rid], told[rid] = clock(), []
                self._send(rid, rng, cell.prompt_len, ANSWER)
            batch = self._scheduler.next_batch(0.0)
            assert batch is not None, "no step is in flight, yet requests are waiting"
            result = self._step_runner.run(batch).result
            steps += 1
            for event in self._scheduler.process_result(result, 0.0):
                told[event.request.rid] += [clock()] * len(event.token_ids)
        seconds = clock() - began
        self._scheduler.flush_cache()
        gaps = np.concatenate([np.diff(times) for name, times in told.items() if name not in sent]) * 1e3
        p50, p99 = np.percentile(gaps, [50, 99]).tolist()
        tokens = args.streams * (STREAM_PROMPT + args.tokens) + len(sent) * (cell.prompt_len + ANSWER)
        cell.tokens_per_s.append(tokens / seconds)
        cell.gap_ms.append({"p50": p50, "p99": p99, "max": float(gaps.max())})
        cell.first_token_ms.append(1e3 * median(told[rid][0] - at for rid, at in sent.items()))
        cell.steps.append(steps)

    def _send(self, rid: str, rng: np.random.Generator, length: int, new: int) -> None:
        ids = rng.integers(0, self._vocab_size, length).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
        self._scheduler.add_request(RequestSpec(rid=rid, input_ids=pack_ids(ids), sampling=sampling), 0.0)


def measure(args: argparse.Namespace) -> list[Cell]:
    cells = {(way, length): Cell(way, length) for length in args.prompt_lens for way in WAYS}
    with tempfile.TemporaryDirectory() as made:
        write_dummy_model(Path(made), SHAPES[args.shape])
        engines = {way: Engine(Path(made), way, args) for way in WAYS}
    for engine in engines.values():
        engine.run(Cell("warm-up", min(args.prompt_lens)), seed=0)
    for number in range(args.rounds):
        for length in args.prompt_lens:
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                engines[way].run(cells[way, length], seed=1 + number)
    return list(cells.values())


def print_table(cells: list[Cell]) -> None:
    print(
        f"\n{'prompts of':<12}{'steps':<8}{'tokens/s':>10}{'gap p50 ms':>12}{'p99':>8}{'max':>8}{'first token ms':>16}"
    )
    for cell in cells:
        print(
            f"{cell.prompt_len:<12}{cell.way:<8}{median(cell.tokens_per_s):>10.0f}{cell.gap('p50'):>12.1f}"
            f"{cell.gap('p99'):>8.0f}{cell.gap('max'):>8.0f}{median(cell.first_token_ms):>16.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-lens", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--every", type=int, default=4, help="tokens of a stream from one prompt to the next")
    parser.add_argument("--chunk", type=int, default=2048, help="--chunked-prefill-size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="llama-40m")
    parser.add_argument("--threads", type=int, default=1)
    add_cpu_time(parser)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    check_cpu_time(parser, args)
    if args.tokens <= args.every:
        parser.error(f"no prompt would arrive: --tokens is {args.tokens}, give more than --every ({args.every})")
    torch.set_num_threads(args.threads)
    cells = measure(args)
    print_table(cells)
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    report = {**about_this_run("cpu"), **settings, "cells": [asdict(cell) for cell in cells]}
    (args.out / "mixed_steps.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
