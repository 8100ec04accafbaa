"""Measures two-stage requests, where the second stage continues the first, and the cost of sending everything again.

    python -m benchmarks.serving.two_stage [--prompt-lens 500 3000] [--concurrency 1 16 64] [--plot]

    --url http://localhost:30000            Baton's server, native API
    --openai-url http://localhost:8000      any server with /v1/completions
    --beam-width 32 [--beam-steps 3]        stage 2 is a beam search: see benchmarks/beams/search_stage.py
    --handoff-check 1000                    see handoff_check.py
    --gpu [--http] [--profile]              on a GPU, with both kinds of stage 2: see gpu_two_stage.py

Stage 1 samples 200 tokens after a random prompt; stage 2 adds a suffix of 3 tokens and generates 3. Three modes:

    replay        prompt + output + suffix again, on an emptied cache
    radix         the same, on the cache as it is
    continuation  the suffix alone, as a continuation of stage 1, which was retained

"pressed": between the stages other prompts evict everything evictable. All pairs of a round do stage 1 together, then
all do stage 2 together. The modes take turns, in reverse order every other round. TTFT and total are those of stage 2;
wall is both stages of a round, without the other prompts. "computed" is the number of prompt tokens of stage 2 that
were not cached. Without a URL: the engine in this process, on token ids, with a 40 M-parameter Llama of random weights,
float32 on a CPU; the pool holds all pairs in 80 % of its tokens. Writes two_stage.json to benchmarks/results/.

To measure a server, start it with --max-leased-ratio 0.9, --max-leased-requests and --max-running-requests of the most
pairs at once, and a pool (--max-total-tokens) that holds them; a larger pool only makes the pressure take longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.beams.search_stage import run_beam_stage
from benchmarks.common.clients import SAMPLED, Call, Client, EngineClient, NativeClient, OpenAIClient, Reply
from benchmarks.common.gpu_run import add_gpu_arguments, check_gpu_arguments
from benchmarks.common.measured import RESULTS
from benchmarks.common.models import LLAMA_40M, write_dummy_model
from benchmarks.serving.gpu_two_stage import run_gpu_two_stage
from benchmarks.serving.handoff_check import run_handoff_check

GOAL_PROMPT_LEN, GOAL_RATIO = 3000, 10
"""Stage-2 TTFT of continuation, at least so many times below that of replay."""

PAIRS_SHARE = 0.8
"""Share of the pool that the concurrent pairs of a round fill."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Lengths of a pair, in tokens."""

    prompt: int
    stage1: int
    suffix: int
    stage2: int

    @property
    def whole(self) -> int:
        return self.prompt + self.stage1 + self.suffix + self.stage2


@dataclass
class Cell:
    """One line of the table. Times in seconds: one per pair in ttft and total, one per round in stage1 and wall."""

    mode: str
    pressed: bool
    prompt_len: int
    concurrency: int
    ttft: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    stage1: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    paths: Counter[str] = field(default_factory=Counter)
    emptied_by: str = ""
    """How replay got its empty cache: flush, or a new prompt where the server cannot flush."""

    def add_pair(self, stage1_s: float, stage2_s: float, replies: list[Reply]) -> None:
        self.stage1.append(stage1_s)
        self.wall.append(stage1_s + stage2_s)
        for reply in replies:
            self.ttft.append(reply.ttft)
            self.total.append(reply.total)
            if reply.computed_tokens is not None:
                self.computed.append(reply.computed_tokens)
            if reply.path is not None:
                self.paths[reply.path] += 1


# -- the workload ------------------------------------------------------------------------------------------------------


async def run_round(client: Client, work: Workload, cell: Cell, rng: np.random.Generator, pressure: int) -> None:
    """One round of ``cell.concurrency`` pairs. pressure: tokens of other prompts between the stages; 0 asks the server
    how many it takes."""
    await client.flush()
    retain_ttl = 3600.0 if cell.mode == "continuation" else None
    prompts = [client.make_prompt(rng, work.prompt) for _ in range(cell.concurrency)]
    suffix = client.make_prompt(rng, work.suffix)
    began = time.perf_counter()
    firsts = await asyncio.gather(
        *(
            client.send_call(
                Call(prompt=prompt, max_tokens=work.stage1, sampling=SAMPLED | {"seed": seed}, retain_ttl=retain_ttl)
            )
            for seed, prompt in enumerate(prompts)
        )
    )
    stage1_s = time.perf_counter() - began
    if cell.pressed:
        await press(client, rng, pressure)
    if cell.mode == "replay":
        cell.emptied_by = "flush" if await client.flush() else "a new prompt"
        if cell.emptied_by != "flush":
            prompts = [client.make_prompt(rng, work.prompt) for _ in prompts]
    began = time.perf_counter()
    replies = await asyncio.gather(
        *(
            client.send_call(Call(prompt=suffix, max_tokens=work.stage2, stream=True, parent=first.name))
            if cell.mode == "continuation"
            else client.send_call(Call(prompt=prompt + first.output + suffix, max_tokens=work.stage2, stream=True))
            for prompt, first in zip(prompts, firsts)
        )
    )
    cell.add_pair(stage1_s, time.perf_counter() - began, replies)


async def press(client: Client, rng: np.random.Generator, num_tokens: int) -> None:
    """Other prompts, as many tokens as are free or evictable now: what was evictable has been evicted after that."""
    if not num_tokens:
        stats = await client.stats()
        if stats is None:
            raise SystemExit("this server does not tell the size of its cache; give --pressure-tokens or --no-pressed")
        num_tokens = stats["free_tokens"] + stats["evictable_tokens"]
    # So short that four of them find room without breaking leases.
    length = max(1, min(512, num_tokens // 8))
    calls = [Call(prompt=client.make_prompt(rng, length), max_tokens=1) for _ in range(-(-num_tokens // length))]
    turns = asyncio.Semaphore(4)

    async def send(call: Call) -> None:
        async with turns:
            await client.send_call(call)

    await asyncio.gather(*map(send, calls))


async def measure(client: Client, work: Workload, concurrency: int, args: argparse.Namespace) -> list[Cell]:
    """All modes, in turns, until each has its pairs."""
    variants = [("replay", False), ("radix", False), ("radix", True), ("continuation", False), ("continuation", True)]
    cells = [
        Cell(mode, pressed, work.prompt, concurrency)
        for mode, pressed in variants
        if mode in args.modes and (client.continues or mode != "continuation") and (args.pressed or not pressed)
    ]
    rng = np.random.default_rng(args.seed)
    warm_up = Workload(prompt=32, stage1=8, suffix=work.suffix, stage2=work.stage2)
    for cell in cells:
        await run_round(client, warm_up, Cell(cell.mode, False, 32, 1), rng, args.pressure_tokens)
    rounds = range(-(-args.pairs // concurrency))
    turns = [cell for number in rounds for cell in (cells if number % 2 == 0 else cells[::-1])]
    for cell in tqdm(turns, f"{work.prompt} tokens, {concurrency} at once", unit="round", leave=False):
        await run_round(client, work, cell, rng, args.pressure_tokens)
    return cells


# -- clients -----------------------------------------------------------------------------------------------------------


def make_client(args: argparse.Namespace, folder: Path, work: Workload, concurrency: int) -> Client:
    if args.url:
        return NativeClient(args.url, args.api_key, args.timeout)
    if args.openai_url:
        return OpenAIClient(args.openai_url, args.api_key, args.timeout)
    page = args.page_size
    pool = int(concurrency * -(-work.whole // page) * page / PAIRS_SHARE)
    return EngineClient(
        {
            "model_path": args.model or str(folder),
            "load_format": "auto" if args.model else "dummy",
            "context_length": work.whole + 8,
            "max_total_tokens": -(-pool // page) * page,
            "page_size": page,
            "max_running_requests": max(concurrency, 4),
            "max_leased_requests": concurrency,
            "max_leased_ratio": 0.9,
        }
    )


async def run(args: argparse.Namespace) -> list[Cell]:
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as made:
        write_dummy_model(Path(made), LLAMA_40M)
        for prompt_len in args.prompt_lens:
            work = Workload(prompt=prompt_len, stage1=args.stage1_tokens, suffix=3, stage2=args.stage2_tokens)
            for concurrency in args.concurrency:
                client = make_client(args, Path(made), work, concurrency)
                try:
                    await client.open_session()
                    measured = await measure(client, work, concurrency, args)
                finally:
                    await client.close()
                print_cells(measured)
                cells += measured
    return cells


# -- results -----------------------------------------------------------------------------------------------------------

HEADER = (
    f"{'prompt':>6}{'conc':>6}  {'mode':<22}{'TTFT ms':>9}{'p95':>9}{'total ms':>10}{'wall s':>9}{'computed':>10}"
    f"{'most':>6}  paths"
)


def print_cells(cells: list[Cell]) -> None:
    for cell in cells:
        name = cell.mode + (", pressed" if cell.pressed else "")
        computed = f"{median(cell.computed):>10.0f}{max(cell.computed):>6}" if cell.computed else f"{'-':>10}{'-':>6}"
        paths = ", ".join(f"{count} {path}" for path, count in cell.paths.items())
        print(
            f"{cell.prompt_len:>6}{cell.concurrency:>6}  {name:<22}{median(cell.ttft) * 1e3:>9.1f}"
            f"{np.percentile(cell.ttft, 95) * 1e3:>9.1f}{median(cell.total) * 1e3:>10.1f}{median(cell.wall):>9.2f}"
            f"{computed}  {paths}",
            flush=True,
        )
    if ratio := ttft_ratio(cells):
        goal = f" (goal: {GOAL_RATIO})" if cells[0].prompt_len == GOAL_PROMPT_LEN else ""
        print(f"{'':>14}TTFT of replay / continuation, pressed: {ratio:.1f}{goal}\n", flush=True)


def ttft_ratio(cells: list[Cell]) -> float | None:
    """Median TTFT of replay over that of continuation under pressure, of one workload."""
    medians = {(cell.mode, cell.pressed): median(cell.ttft) for cell in cells}
    replay, ours = medians.get(("replay", False)), medians.get(("continuation", True))
    return replay / ours if replay and ours else None


def write_json(cells: list[Cell], args: argparse.Namespace) -> None:
    import torch

    report: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "load_average": os.getloadavg(),
        **{name: value for name, value in vars(args).items() if name not in ("api_key", "out")},
        "cells": [vars(cell) for cell in cells],
    }
    args.out.mkdir(exist_ok=True)
    (args.out / "two_stage.json").write_text(json.dumps(report, indent=1) + "\n")


def plot(cells: list[Cell], out: Path) -> None:
    """Median stage-2 TTFT over concurrency, one panel per prompt length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({cell.prompt_len for cell in cells})
    figure, panels = pyplot.subplots(
        1, len(lengths), figsize=(5 * len(lengths), 4), squeeze=False, layout="constrained"
    )
    for panel, length in zip(panels[0], lengths):
        here = [cell for cell in cells if cell.prompt_len == length]
        for mode, pressed in dict.fromkeys((cell.mode, cell.pressed) for cell in here):
            line = [cell for cell in here if (cell.mode, cell.pressed) == (mode, pressed)]
            times = [median(cell.ttft) * 1e3 for cell in line]
            label = mode + (", pressed" if pressed else "")
            panel.plot([cell.concurrency for cell in line], times, marker="o", label=label)
        panel.set(title=f"{length}-token prompts", xlabel="concurrent pairs", ylabel="stage-2 TTFT, ms")
        panel.set(xscale="log", yscale="log")
        panel.set_xticks([cell.concurrency for cell in here], [str(cell.concurrency) for cell in here])
        panel.legend()
    figure.savefig(out / "two_stage.png", dpi=150)


OF_A_CPU = ("modes", "pressed", "pressure_tokens", "model", "openai_url", "transformers", "handoff_check", "page_sizes")
"""Flags that a run on a GPU has no use for."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-lens", "--prompt-len", type=int, nargs="+", default=[500])
    parser.add_argument("--stage1-tokens", type=int, default=200)
    parser.add_argument("--stage2-tokens", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--pairs", type=int, default=8, help="pairs per line of the table, at least")
    parser.add_argument("--modes", nargs="+", choices=["replay", "radix", "continuation"], default=None)
    parser.add_argument("--pressed", action=argparse.BooleanOptionalAction, default=True, help="pressed rounds too")
    parser.add_argument("--pressure-tokens", type=int, default=0, help="0: what the server says is free or evictable")
    parser.add_argument("--page-size", type=int, default=1, help="of the engine in this process")
    parser.add_argument("--model", default="", help="folder of a model for the engine in this process")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", default="", help="our server, native API")
    where.add_argument("--openai-url", default="", help="a server with /v1/completions; continuations if it is ours")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take over HTTP")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", action="store_true", help="also two_stage.png, of the TTFT over concurrency")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    beams = parser.add_argument_group("stage 2 as a beam search, see benchmarks/beams/search_stage.py")
    beams.add_argument("--beam-width", type=int, default=0, help="only this, with so many beams")
    beams.add_argument("--beam-steps", type=int, default=3, help="tokens of each result")
    beams.add_argument("--transformers", type=int, nargs="*", default=[1], metavar="CONC", help="with so many at once")
    parser.add_argument("--handoff-check", type=int, default=0, metavar="PAIRS", help="only this; exits 1 if it fails")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16, 64], help="for --handoff-check")
    add_gpu_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3, help="with --gpu: at least so many, however many pairs")
    parser.add_argument(
        "--beam-concurrency", type=int, nargs="*", default=[1, 16], help="with --gpu: where stage 2 is a search, too"
    )
    parser.add_argument("--http", action="store_true", help="with --gpu: a second time, over HTTP to a server")
    args = parser.parse_args()
    check_gpu_arguments(args, parser, only_with=["rounds", "beam_concurrency", "http"], never_with=OF_A_CPU)
    args.modes = args.modes or ["replay", "radix", "continuation"]
    if args.beam_width and args.openai_url:
        parser.error("--beam-width needs the native API: use --url, or neither")
    return args


def main() -> None:
    args = parse_arguments()
    if args.gpu:
        raise SystemExit(run_gpu_two_stage(args))
    if args.handoff_check:
        raise SystemExit(asyncio.run(run_handoff_check(args.handoff_check, args.page_sizes, args.seed, args.out)))
    if args.beam_width:
        raise SystemExit(run_beam_stage(args))
    print(HEADER)
    cells = asyncio.run(run(args))
    write_json(cells, args)
    if args.plot:
        plot(cells, args.out)
    print("load average: " + ", ".join(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    main()
