"""Two-stage requests with a beam search as their second stage. Run by `benchmarks.serving.two_stage --beam-width 32`.

Stage 1 samples 200 tokens after a random prompt of 500; stage 2 adds a suffix of 3 tokens and searches 32 beams × 3
tokens. The methods of peers.py run in turns on the same weights. Native and serving layer swap their order every other
round. transformers only checks the results: it runs the first round, after the native search, with the outputs of its
stage 1.

All results of a search come at once, at its end, so the TTFT of stage 2 is its total. "total" is the time that one
caller waits for stage 2; "stage 2" the time until the searches of all pairs of a round are done; "cpu" the CPU time of
this process, engine and caller, meanwhile: compare that if the machine has other work. "wall" adds stage 1. "computed"
is the number of prompt tokens of stage 2 that were not cached, over all requests of a search.

Every search must find what the native one finds: the same sequences in the same order, scores within 1e-3. Where two
candidates are almost equally likely, rounding decides which comes first, or whether it is continued: such searches
count as near ties. Any other difference makes the run exit with 1. Pairs whose stage 1 differs (again by rounding) are
not compared.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import platform
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.beams.peers import Ids, LayerBeams, NativeBeams, Peer, Search, TransformersBeams
from benchmarks.common.clients import EngineClient, NativeClient
from benchmarks.common.models import LLAMA_40M, save_random_model, write_tokenizer

SCORE_TOLERANCE = 1e-3
NEAR_TIE = 1e-4
"""Distance in log-probability, over the whole sequence, below which the order of two candidates means nothing."""

SUFFIX = 3

WALL_GOALS = {1: 4.0, 16: 25.0}
"""Seconds of a round by concurrency, of the 40 M model on two cores; with the lengths below."""
RATIO_GOAL = 3.0
"""Stage 2 of the serving layer over ours."""
GOAL_LENGTHS = (500, 200, 32, 3)
"""prompt, stage 1, beam width, beam steps"""


@dataclass
class BeamCell:
    """One line of the table. Times in seconds: one per pair in total, one per round in stage1, stage2, cpu and wall."""

    peer: str
    prompt_len: int
    concurrency: int
    total: list[float] = field(default_factory=list)
    stage1: list[float] = field(default_factory=list)
    stage2: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU time of stage 2; meaningless if the engine is another process."""
    wall: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    paths: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    """Its searches with ours: equal, near tie, different, not compared."""
    worst_score: float = 0.0
    """Largest difference of a score."""

    def add_round(self, done: Round) -> None:
        self.stage1.append(done.stage1_s)
        self.stage2.append(done.stage2_s)
        self.cpu.append(done.cpu_s)
        self.wall.append(done.stage1_s + done.stage2_s)
        for search in done.searches:
            self.total.append(search.seconds)
            if search.computed_tokens is not None:
                self.computed.append(search.computed_tokens)
            if search.path is not None:
                self.paths[search.path] += 1


@dataclass
class Round:
    """One round of a peer, with all pairs."""

    outputs: list[Ids]
    """Outputs of stage 1, or the ids that stage 2 continued instead."""
    searches: list[Search]
    stage1_s: float
    stage2_s: float
    cpu_s: float


# -- agreement ---------------------------------------------------------------------------------------------------------


def compare(ours: Search, other: Search, margin: float | None) -> tuple[str, float]:
    """(verdict as in `BeamCell.compared`, largest difference of a score). margin: of the search, see `Search`; None
    if unknown."""
    mine, theirs = scores_of(ours), scores_of(other)
    common = mine.keys() & theirs.keys()
    apart = max((abs(mine[ids] - theirs[ids]) for ids in common), default=0.0)
    if apart > SCORE_TOLERANCE:
        return "different", apart
    if ours.sequences == other.sequences:
        return "equal", apart
    if not (is_order_of(mine, other.sequences) and is_order_of(theirs, ours.sequences)):
        return "different", apart
    if mine.keys() == theirs.keys():
        return "near tie", apart
    if margin is None:
        return "not compared", apart
    return "near tie" if margin <= NEAR_TIE else "different", apart


def is_order_of(scores: dict[tuple[int, ...], float], sequences: list[Ids]) -> bool:
    """Are these sequences, those of them that have a score, in the order of their scores but for near ties?"""
    known = [(scores[tuple(ids)], len(ids)) for ids in sequences if tuple(ids) in scores]
    return all(after - before <= NEAR_TIE / length for (before, length), (after, _) in itertools.pairwise(known))


def scores_of(search: Search) -> dict[tuple[int, ...], float]:
    return {tuple(ids): score for ids, score in zip(search.sequences, search.scores, strict=True)}


def check_round(cells: list[BeamCell], rounds: dict[str, Round]) -> None:
    """Count how the searches of every peer compare with ours."""
    ours, layer = rounds[NativeBeams.name], rounds[LayerBeams.name]
    margins = [
        found.margin if output == own else None
        for found, output, own in zip(layer.searches, layer.outputs, ours.outputs, strict=True)
    ]
    for cell in cells:
        if cell.peer == NativeBeams.name or cell.peer not in rounds:
            continue
        other = rounds[cell.peer]
        for i, (mine, theirs) in enumerate(zip(ours.searches, other.searches, strict=True)):
            if other.outputs[i] != ours.outputs[i]:
                cell.compared["not compared"] += 1
                continue
            verdict, apart = compare(mine, theirs, margins[i])
            cell.compared[verdict] += 1
            cell.worst_score = max(cell.worst_score, apart)


def failures(cells: list[BeamCell]) -> list[str]:
    """Failures: searches that differ, and peers without any compared search."""
    found = []
    for cell in cells:
        where = f"{cell.peer}, {cell.concurrency} at once"
        if cell.compared["different"]:
            found.append(f"{where}: {cell.compared['different']} searches found something else than ours")
        if cell.compared and not cell.compared["equal"]:
            found.append(f"{where}: no search was found to be equal to ours")
        if cell.peer == NativeBeams.name and cell.paths["handoff"] < len(cell.total):
            found.append(f"{where}: {len(cell.total) - cell.paths['handoff']} pairs were not handed off")
    return found


# -- the workload ------------------------------------------------------------------------------------------------------


async def run_round(
    client: EngineClient | NativeClient, peer: Peer, prompts: list[Ids], suffix: Ids, args: Namespace, own: Round | None
) -> Round:
    """Both stages of all pairs. own: our round, if its stage 1 is what the searches go on from."""
    await client.flush()
    began = time.perf_counter()
    outputs = await peer.think(prompts, args.stage1_tokens)
    stage1_s = time.perf_counter() - began
    if own is not None:
        outputs = own.outputs
    wholes = [prompt + output + suffix for prompt, output in zip(prompts, outputs)]
    began, cpu_began = time.perf_counter(), time.process_time()
    searches = await peer.search(wholes, suffix, args.beam_width, args.beam_steps)
    stage2_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return Round(outputs, searches, stage1_s, stage2_s, cpu_s)


async def measure(
    client: EngineClient | NativeClient,
    transformers: Peer | None,
    prompt_len: int,
    concurrency: int,
    args: Namespace,
) -> list[BeamCell]:
    peers: list[Peer] = [NativeBeams(client), LayerBeams(client)]
    cells = [BeamCell(peer.name, prompt_len, concurrency) for peer in peers]
    rng = np.random.default_rng(args.seed)
    warm_up = Namespace(stage1_tokens=4, beam_width=args.beam_width, beam_steps=args.beam_steps)
    for peer in peers if transformers is None else [*peers, transformers]:
        await run_round(client, peer, [client.make_prompt(rng, 16)], client.make_prompt(rng, SUFFIX), warm_up, None)
    if transformers is not None:
        cells.append(BeamCell(transformers.name, prompt_len, concurrency))
    count = max(2, -(-args.pairs // concurrency))  # both orders
    for number in tqdm(range(count), f"{prompt_len} tokens, {concurrency} at once", unit="round", leave=False):
        prompts = [client.make_prompt(rng, prompt_len) for _ in range(concurrency)]
        suffix = client.make_prompt(rng, SUFFIX)
        rounds: dict[str, Round] = {}
        turns = list(zip(peers, cells))
        turns = turns if number % 2 == 0 else turns[::-1]
        if transformers is not None and number == 0:
            turns.append((transformers, cells[-1]))
        for peer, cell in turns:
            own = rounds[NativeBeams.name] if peer is transformers else None
            rounds[peer.name] = await run_round(client, peer, prompts, suffix, args, own)
            cell.add_round(rounds[peer.name])
        check_round(cells, rounds)
    return cells


def make_client(args: Namespace, folder: Path, prompt_len: int, concurrency: int) -> EngineClient | NativeClient:
    if args.url:
        return NativeClient(args.url, args.api_key, args.timeout)
    page, width = args.page_size, args.beam_width
    whole = prompt_len + args.stage1_tokens + SUFFIX + args.beam_steps
    # Pages behind the prompt are every beam's own; the first of them may be partly the prompt's.
    pool = concurrency * (whole + page + width * -(-(page + args.beam_steps) // page) * page)
    return EngineClient(
        {
            "model_path": str(folder),
            "context_length": whole + 8,
            "max_total_tokens": -(-pool * 5 // 4 // page) * page,
            "page_size": page,
            "max_running_requests": concurrency * width,
            "max_logprobs": 2 * width,
            "max_beam_width": width,
            "max_leased_requests": concurrency,
            "max_leased_ratio": 0.9,
        }
    )


async def run(args: Namespace, print_cells: Callable[[list[BeamCell]], None]) -> list[BeamCell]:
    cells: list[BeamCell] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(args.model or made)
        if not args.model and not args.url:
            save_random_model(folder, LLAMA_40M)
            write_tokenizer(folder, LLAMA_40M["vocab_size"])
        transformers = TransformersBeams(folder) if args.transformers and not args.url else None
        for prompt_len in args.prompt_lens:
            for concurrency in args.concurrency:
                client = make_client(args, folder, prompt_len, concurrency)
                try:
                    await client.open_session()
                    theirs = transformers if concurrency in args.transformers else None
                    measured = await measure(client, theirs, prompt_len, concurrency, args)
                finally:
                    await client.close()
                print_cells(measured)
                cells += measured
    return cells


def run_beam_stage(args: Namespace) -> int:
    """Run, print and write everything; returns the process's exit status."""
    print(HEADER)
    cells = asyncio.run(run(args, lambda measured: print_cells(measured, args)))
    write_json(cells, args)
    if args.plot:
        plot(cells, args)
    print("load average: " + ", ".join(f"{load:.1f}" for load in os.getloadavg()))
    failed = failures(cells)
    for failure in failed:
        print(f"FAILED: {failure}")
    return int(bool(failed))


# -- results -----------------------------------------------------------------------------------------------------------

HEADER = (
    f"{'prompt':>6}{'conc':>6}  {'stage 2':<14}{'total ms':>10}{'p95':>9}{'stage 1 s':>11}{'stage 2 s':>11}"
    f"{'cpu s':>8}{'wall s':>9}{'computed':>10}  searches, compared with native"
)


def print_cells(cells: list[BeamCell], args: Namespace) -> None:
    for cell in cells:
        computed = f"{median(cell.computed):>10.0f}" if cell.computed else f"{'-':>10}"
        counts = cell.paths if cell.peer == NativeBeams.name else cell.compared
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        if cell.compared:
            verdicts += f", scores within {cell.worst_score:.1e}"
        print(
            f"{cell.prompt_len:>6}{cell.concurrency:>6}  {cell.peer:<14}{median(cell.total) * 1e3:>10.1f}"
            f"{np.percentile(cell.total, 95) * 1e3:>9.1f}{median(cell.stage1):>11.2f}{median(cell.stage2):>11.3f}"
            f"{median(cell.cpu):>8.2f}{median(cell.wall):>9.2f}{computed}  {verdicts}",
            flush=True,
        )
    ours = cells[0]
    lengths = (ours.prompt_len, args.stage1_tokens, args.beam_width, args.beam_steps)
    has_goals = lengths == GOAL_LENGTHS and not args.model and not args.url
    said = []
    for name, (ratio, cpu_ratio) in ratios(cells).items():
        goal = f" (goal: {RATIO_GOAL:.0f})" if has_goals else ""
        said.append(f"{name} / native: {ratio:.1f}{goal}, of their cpu {cpu_ratio:.1f}")
    if has_goals and ours.concurrency in WALL_GOALS:
        said.append(f"wall of native: {median(ours.wall):.2f} s (goal: {WALL_GOALS[ours.concurrency]:.0f})")
    print(f"{'':>14}stage 2 of {'; '.join(said)}\n", flush=True)


def ratios(cells: list[BeamCell]) -> dict[str, tuple[float, float]]:
    """Peer -> median stage 2 of a round over ours, and the same of its cpu time; of one workload. Not of transformers,
    which is there to check the results."""
    ours = cells[0]
    return {
        cell.peer: (median(cell.stage2) / median(ours.stage2), median(cell.cpu) / median(ours.cpu))
        for cell in cells[1:]
        if cell.peer != TransformersBeams.name
    }


def write_json(cells: list[BeamCell], args: Namespace) -> None:
    import torch

    report: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        **{name: value for name, value in vars(args).items() if name not in ("api_key", "out")},
        "cells": [vars(cell) for cell in cells],
    }
    args.out.mkdir(exist_ok=True)
    (args.out / "two_stage_beams.json").write_text(json.dumps(report, indent=1) + "\n")


def plot(cells: list[BeamCell], args: Namespace) -> None:
    """Median latency of stage 2 over concurrency, one panel per prompt length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    lengths = sorted({cell.prompt_len for cell in cells})
    figure, panels = pyplot.subplots(
        1, len(lengths), figsize=(6 * len(lengths), 4), squeeze=False, layout="constrained"
    )
    labels = {NativeBeams.name: "native beams, after a handoff", LayerBeams.name: "serving-layer beams"}
    for panel, length in zip(panels[0], lengths):
        for name, label in labels.items():
            line = [cell for cell in cells if cell.prompt_len == length and cell.peer == name]
            times = [median(cell.total) * 1e3 for cell in line]
            panel.plot([cell.concurrency for cell in line], times, marker="o", label=label)
        ticks = sorted({cell.concurrency for cell in cells})
        panel.set(xscale="log", yscale="log", xlabel="searches at once", ylabel="stage 2, ms")
        panel.set(title=f"beam {args.beam_width} × {args.beam_steps} after {length} + {args.stage1_tokens} tokens")
        panel.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        panel.set_xticks([], minor=True)
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:.0f}"))
        panel.yaxis.set_minor_locator(ticker.NullLocator())
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(args.out / "two_stage_beams.png", dpi=150)
