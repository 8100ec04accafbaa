"""Two-stage requests of a named shape: `benchmarks.serving.two_stage --gpu`.

    prompt of 500 ─▶ stage 1: sample 200 ─▶ handoff ─▶ stage 2: 4 ids, then 3 tokens, streamed      TTFT, total
                                            handoff ─▶ stage 2: 4 ids, then a beam search of 3 × 32  total

All pairs of a round do stage 1 together, then all do stage 2 together, each with a parent of its own. On token ids,
through the engine in this process; with --http also through a server that is started for the purpose, or with --url
through one that runs. Times are the clients': from the call to the first token, or to the whole answer.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import uvloop
from tqdm import tqdm

from benchmarks.common import published
from benchmarks.common.clients import GREEDY, SAMPLED, Call, EngineClient, NativeClient, Reply, native_fields
from benchmarks.common.gpu_run import cell, describe_setup, dummy_model, finish, has_goals, model_settings, served
from benchmarks.common.raw_http import BareClient

RETAIN_S = 3600.0
MAX_PREFILL = 8192


@dataclass
class Line:
    """One concurrency. Times in seconds: one per pair in ttft, total and beam, one per round in stage1."""

    concurrency: int
    stage1: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    beam: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    """Prompt tokens of stage 2 that were not cached."""
    paths: Counter[str] = field(default_factory=Counter)


# -- the workload ------------------------------------------------------------------------------------------------------


async def first_stage(
    client: EngineClient | NativeClient, count: int, args: argparse.Namespace, rng: np.random.Generator
) -> tuple[list[Reply], float]:
    """-> (the retained parents, seconds of all of them)"""
    calls = [
        Call(
            prompt=client.make_prompt(rng, args.prompt_lens[0]),
            max_tokens=args.stage1_tokens,
            sampling=SAMPLED | {"seed": int(rng.integers(2**31))},
            retain_ttl=RETAIN_S,
        )
        for _ in range(count)
    ]
    began = time.perf_counter()
    parents = await asyncio.gather(*(client.send_call(call) for call in calls))
    for parent in parents:
        if parent.refused:
            raise RuntimeError(f"stage 1 was not retained: {parent.refused}")
    return parents, time.perf_counter() - began


async def second_stage(
    client: EngineClient | NativeClient, parent: Reply, suffix: list[int], args: argparse.Namespace
) -> Reply:
    return await client.send_call(
        Call(prompt=suffix, max_tokens=args.stage2_tokens, sampling=GREEDY, stream=True, parent=parent.name)
    )


async def beam_stage(
    client: EngineClient | NativeClient, parent: Reply, suffix: list[int], args: argparse.Namespace
) -> tuple[float, dict[str, Any]]:
    """-> (seconds, meta_info of the best result)"""
    width = args.beam_width or published.BEAMS
    sampling = {"beam_width": width, "n": width}
    fields = native_fields(Call(prompt=suffix, max_tokens=args.beam_steps, sampling=sampling, parent=parent.name))
    began = time.perf_counter()
    outputs = await client.answer(fields)
    seconds = time.perf_counter() - began
    if len(outputs) != width:
        raise RuntimeError(f"a search of width {width} answered with {len(outputs)} results")
    return seconds, outputs[0]["meta_info"]


async def run_round(
    client: EngineClient | NativeClient, line: Line, args: argparse.Namespace, rng: np.random.Generator
) -> None:
    """Both kinds of stage 2, each after a stage 1 of its own."""
    suffix = client.make_prompt(rng, published.SUFFIX)
    parents, seconds = await first_stage(client, line.concurrency, args, rng)
    line.stage1.append(seconds)
    for reply in await asyncio.gather(*(second_stage(client, parent, suffix, args) for parent in parents)):
        line.ttft.append(reply.ttft)
        line.total.append(reply.total)
        line.computed.append(reply.computed_tokens or 0)
        line.paths[str(reply.path)] += 1
    if line.concurrency not in args.beam_concurrency:
        return
    parents, _ = await first_stage(client, line.concurrency, args, rng)
    for seconds, meta in await asyncio.gather(*(beam_stage(client, parent, suffix, args) for parent in parents)):
        line.beam.append(seconds)
        line.paths[meta["continuation"]["path"]] += 1


async def profile_round(
    client: EngineClient | NativeClient, line: Line, args: argparse.Namespace, rng: np.random.Generator
) -> dict[str, Any]:
    """Profiles of stage 2 alone, by label."""
    suffix, profiles = client.make_prompt(rng, published.SUFFIX), {}
    stages: dict[str, Any] = {"stage 2": second_stage}
    if line.concurrency in args.beam_concurrency:
        stages["beam"] = beam_stage
    for name, stage in stages.items():
        parents, _ = await first_stage(client, line.concurrency, args, rng)
        await client.start_profile()
        await asyncio.gather(*(stage(client, parent, suffix, args) for parent in parents))
        for kind, group in (await client.stop_profile())["kinds"].items():
            if kind != "all":
                profiles[f"{name}, {line.concurrency}, {kind}"] = group
    return profiles


async def measure(
    client: EngineClient | NativeClient, lines: list[Line], args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, Any]]:
    """-> (what the worker says of itself, profiles by label)"""
    rng = np.random.default_rng(args.seed)
    profiles: dict[str, Any] = {}
    try:
        await client.open_session()
        info = await client.info()
        for line in lines:
            await run_round(client, Line(line.concurrency), args, rng)  # warms up
        turns = [line for line in lines for _ in range(max(args.rounds, -(-args.pairs // line.concurrency)))]
        for line in tqdm(turns, "two stages", unit="round", leave=False):
            await run_round(client, line, args, rng)
        for line in lines if args.profile else []:
            profiles |= await profile_round(client, line, args, rng)
    finally:
        await client.close()
    return info, profiles


def engine_settings(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Settings of the engine, or of a server."""
    most = max(args.concurrency)
    width = args.beam_width or published.BEAMS
    rows = max([most, *(width * count for count in args.beam_concurrency if count in args.concurrency)])
    whole = args.prompt_lens[0] + args.stage1_tokens + published.SUFFIX + args.stage2_tokens + args.beam_steps + 8
    page = args.page_size
    # Every pair's own tokens, those of its beams, and as much again that is cached from the rounds before.
    tokens = 2 * most * (whole + page) + rows * (args.beam_steps + 2 * page)
    return model_settings(args, folder) | {
        "context_length": whole + page,
        "max_total_tokens": -(-tokens // page) * page,
        "page_size": page,
        "max_running_requests": rows,
        "max_beam_width": width,
        "max_leased_requests": most,
        "max_leased_ratio": 0.9,
        "chunked_prefill_size": MAX_PREFILL,
        "log_level": "warning",
    }


# -- results -----------------------------------------------------------------------------------------------------------


def goals(line: Line, args: argparse.Namespace) -> dict[str, float | None]:
    """The goals and published figures that apply to the line's shape, card and lengths; None where none does."""
    names = {
        "ttft_goal_ms": published.TTFT_GOAL_MS,
        "beam_goal_ms": published.BEAM_GOAL_MS,
        "sglang_ttft_ms": published.SGLANG_TTFT_MS,
        "sglang_beam_ms": published.SGLANG_BEAM_MS,
        "sglang_stage1_s": published.SGLANG_STAGE1_S,
    }
    lengths = (args.prompt_lens[0], args.stage1_tokens, args.beam_width or published.BEAMS, args.beam_steps)
    usual = (published.PROMPT, published.STAGE1, published.BEAMS, published.BEAM_STEPS)
    known = has_goals(args) and lengths == usual
    return {name: values.get(line.concurrency) if known else None for name, values in names.items()}


def make_table(lines: list[Line], args: argparse.Namespace, info: dict[str, Any], where: str) -> str:
    width = args.beam_width or published.BEAMS
    text = [
        f"\n{describe_setup(args, info)}",
        f"{args.prompt_lens[0]} + {args.stage1_tokens} tokens, beam {width} × {args.beam_steps}, {where}; medians",
        f"{'conc':>5} │{'stage 1 s':>10}{'SGLang*':>9} │{'TTFT ms':>9}{'p95':>8}{'goal':>7}{'SGLang*':>9}{'total':>9} "
        f"│{'beam ms':>9}{'p95':>8}{'goal':>7}{'SGLang*':>9} │  computed, paths",
    ]
    for line in lines:
        beside = goals(line, args)
        text.append(
            f"{line.concurrency:>5} │{cell(median(line.stage1), 10, 3)}{cell(beside['sglang_stage1_s'], 9, 3)} "
            f"│{_times(line.ttft)}{cell(beside['ttft_goal_ms'], 7, 0)}{cell(beside['sglang_ttft_ms'], 9, 1)}"
            f"{cell(median(line.total) * 1e3, 9, 1)} "
            f"│{_times(line.beam)}{cell(beside['beam_goal_ms'], 7, 0)}{cell(beside['sglang_beam_ms'], 9, 1)} "
            f"│  {median(line.computed):.0f}, " + ", ".join(f"{count} {path}" for path, count in line.paths.items())
        )
    if has_goals(args):
        text.append(f"* {published.PUBLISHED}")
    return "\n".join(text)


def _times(seconds: list[float]) -> str:
    """Median and 95th percentile in ms, 9 and 8 wide."""
    if not seconds:
        return cell(None, 9) + cell(None, 8)
    return cell(median(seconds) * 1e3, 9, 1) + cell(float(np.percentile(seconds, 95)) * 1e3, 8, 1)


def run_way(client: EngineClient | NativeClient, name: str, where: str, args: argparse.Namespace) -> dict[str, int]:
    """Measure and tell of one way to the engine. Returns how many pairs took a path other than handoff, by path."""
    lines = [Line(count) for count in args.concurrency]
    info, profiles = uvloop.run(measure(client, lines, args))
    cells = [vars(line) | goals(line, args) for line in lines]
    finish(args, name, info, cells, profiles, make_table(lines, args, info, where))
    return {path: count for line in lines for path, count in line.paths.items() if path != "handoff"}


def run_gpu_two_stage(args: argparse.Namespace) -> int:
    """Returns the process's exit status: 1 if a pair was not handed off, so that the times are of something else."""
    args.out.mkdir(parents=True, exist_ok=True)
    if args.url:
        ways = [run_way(BareClient(args.url, args.api_key, args.timeout), "gpu_two_stage_http", args.url, args)]
    else:
        with dummy_model(args.shape) as folder:
            settings = engine_settings(args, folder)
            ways = [run_way(EngineClient(settings), "gpu_two_stage", "engine in this process", args)]
            if args.http:
                with served(settings, args.out / "gpu_two_stage_server.log") as url:
                    client = BareClient(url, "", args.timeout)
                    ways.append(run_way(client, "gpu_two_stage_http", "server over HTTP", args))
    failed = [others for others in ways if others]
    if failed:
        print(f"FAILED: not handed off: {failed}")
    return int(bool(failed))
