"""Plain serving of a named shape: `benchmarks.serving.offline --gpu`.

There are two measurements, both on one model with dummy weights: a static batch through the model runner, waiting for
every step; and the server's loop, through the engine in this process, on token ids. Only one of the loop's requests
streams, for the time between tokens; streaming all of them would measure this process's clients, which share its
interpreter. All requests start together. Prefill is the time until all have their first token; decode is the median
time between two tokens of the streaming request, which is sent last and ends before the others.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
import uvloop
from tqdm import tqdm

from baton.runtime.config import ModelArgs
from benchmarks.common import published
from benchmarks.common.clients import GREEDY, Call, EngineClient
from benchmarks.common.gpu_run import cell, describe_setup, dummy_model, finish, has_goals, model_settings
from benchmarks.common.models import SHAPES
from benchmarks.serving.static_batch import StaticBatch

MAX_PREFILL = 8192
"""New tokens per step, of both ways."""


@dataclass
class Line:
    """One batch size. Times in seconds, one per round but for static_step and loop_step: one per step."""

    batch_size: int
    prompt_len: int
    static_prefill: list[float] = field(default_factory=list)
    static_step: list[float] = field(default_factory=list)
    loop_prefill: list[float] = field(default_factory=list)
    loop_step: list[float] = field(default_factory=list)

    @property
    def prefill_rate(self) -> float:
        """tokens/s in the loop"""
        return self.batch_size * self.prompt_len / median(self.loop_prefill)


# -- a static batch ----------------------------------------------------------------------------------------------------


def measure_static(lines: list[Line], args: argparse.Namespace, folder: str) -> None:
    """Every batch size in turn, ``args.rounds`` times; the first round warms up and does not count."""
    context = max(line.prompt_len for line in lines) + args.steps + 2
    settings = ModelArgs(**model_settings(args, folder))
    sizes = [line.batch_size for line in lines]
    batch = StaticBatch(settings, num_rows=max(sizes), context=context, max_prefill=MAX_PREFILL)
    vocab_size, rng = SHAPES[args.shape]["vocab_size"], np.random.default_rng(args.seed)
    rounds = [(number, line) for number in range(args.rounds + 1) for line in lines]
    for number, line in tqdm(rounds, "static batch", unit="round", leave=False):
        prompts = rng.integers(0, vocab_size, (line.batch_size, line.prompt_len)).astype(np.int32)
        began = time.perf_counter()
        ids = batch.start(prompts)
        prefill, steps = time.perf_counter() - began, []
        for _ in range(args.steps if number else 3):
            began = time.perf_counter()
            ids = batch.decode(ids)
            steps.append(time.perf_counter() - began)
        if number:
            line.static_prefill.append(prefill)
            line.static_step += steps
    del batch
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()


# -- the server's loop -------------------------------------------------------------------------------------------------


async def between_tokens(client: EngineClient, prompt: list[int], count: int) -> list[float]:
    """Seconds between the tokens of a streamed request. Tokens that a slow reader got together share their time."""
    sampling = GREEDY | {"max_new_tokens": count, "ignore_eos": True}
    arrivals, known = [], []
    async for update in await client.answer({"input_ids": prompt, "sampling_params": sampling, "stream": True}):
        arrivals.append(time.perf_counter())
        known.append(update["meta_info"]["completion_tokens"])
    new = np.diff(known)
    return np.repeat(np.diff(arrivals) / new, new).tolist()


async def prefill_round(client: EngineClient, line: Line, rng: np.random.Generator) -> float:
    """Seconds until every request of a batch has its first, and only, token."""
    prompts = [client.make_prompt(rng, line.prompt_len) for _ in range(line.batch_size)]
    began = time.perf_counter()
    await asyncio.gather(*(client.send_call(Call(prompt=prompt, max_tokens=1)) for prompt in prompts))
    return time.perf_counter() - began


async def decode_round(client: EngineClient, line: Line, rng: np.random.Generator, steps: int) -> list[float]:
    """Seconds between two tokens, with a whole batch running."""
    # While chunks of prompts are computed, those that run already get tokens in between.
    head_start = 2 + line.batch_size * line.prompt_len // MAX_PREFILL
    calls = [
        Call(prompt=client.make_prompt(rng, line.prompt_len), max_tokens=steps + 2 * head_start)
        for _ in range(line.batch_size - 1)
    ]
    others = [asyncio.ensure_future(client.send_call(call)) for call in calls]
    await asyncio.sleep(0)  # they are sent first
    times = await between_tokens(client, client.make_prompt(rng, line.prompt_len), steps)
    await asyncio.gather(*others)
    return times


async def measure_loop(
    lines: list[Line], args: argparse.Namespace, folder: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """-> (what the worker says of itself, profiles by label)"""
    largest = max(line.batch_size for line in lines)
    longest = max(line.prompt_len for line in lines) + args.steps
    room = 2 * (2 + largest * longest // MAX_PREFILL) + 8
    client = EngineClient(
        model_settings(args, folder)
        | {
            "context_length": longest + room,
            "max_total_tokens": largest * (longest + room),
            "max_running_requests": largest,
            "chunked_prefill_size": MAX_PREFILL,
            "log_level": "warning",
        }
    )
    profiles: dict[str, Any] = {}
    rng = np.random.default_rng(args.seed)
    try:
        await client.open_session()
        info = await client.info()
        rounds = [(number, line) for number in range(args.rounds + 1) for line in lines]
        for number, line in tqdm(rounds, "server loop", unit="round", leave=False):
            prefill = await prefill_round(client, line, rng)
            steps = await decode_round(client, line, rng, args.steps if number else 8)
            if number:
                line.loop_prefill.append(prefill)
                line.loop_step += steps
        for line in lines if args.profile else []:
            await client.start_profile()
            await decode_round(client, line, rng, args.steps)
            kinds = (await client.stop_profile())["kinds"]
            profiles |= {f"{kind} {line.batch_size}": kinds[kind] for kind in ("extend", "decode") if kind in kinds}
    finally:
        await client.close()
    return info, profiles


# -- results -----------------------------------------------------------------------------------------------------------


def goals(line: Line, args: argparse.Namespace) -> dict[str, float | None]:
    """The goals and published figures in ms that apply to the line's shape, card and lengths; None where none does."""
    names = {
        "goal_step_ms": published.DECODE_GOAL_MS,
        "sglang_step_ms": published.SGLANG_DECODE_MS,
        "sglang_static_step_ms": published.SGLANG_STATIC_MS,
        "sglang_prefill_ms": published.SGLANG_PREFILL_MS,
    }
    known = has_goals(args) and line.prompt_len == published.PREFILL_LEN
    return {name: values.get(line.batch_size) if known else None for name, values in names.items()}


def make_table(lines: list[Line], args: argparse.Namespace, info: dict[str, Any]) -> str:
    text = [
        f"\n{describe_setup(args, info)}",
        f"in {args.prompt_lens[0]} / out {args.steps}, medians",
        f"{'':>5} │{'static batch, waited for':^33}│{'server loop':^57}",
        f"{'bs':>5} │{'prefill ms':>11}{'step ms':>9}{'SGLang*':>9}{'':>4}"
        f"│{'prefill ms':>11}{'SGLang*':>9}{'tok/s':>9}{'step ms':>9}{'goal':>7}{'SGLang*':>9}",
    ]
    for line in lines:
        beside = goals(line, args)
        text.append(
            f"{line.batch_size:>5} │{cell(median(line.static_prefill) * 1e3, 11, 1)}"
            f"{cell(median(line.static_step) * 1e3, 9)}{cell(beside['sglang_static_step_ms'], 9)}{'':>4}"
            f"│{cell(median(line.loop_prefill) * 1e3, 11, 1)}{cell(beside['sglang_prefill_ms'], 9, 1)}"
            f"{cell(line.prefill_rate, 9, 0)}{cell(median(line.loop_step) * 1e3, 9)}"
            f"{cell(beside['goal_step_ms'], 7, 1)}{cell(beside['sglang_step_ms'], 9)}"
        )
    if has_goals(args):
        best = max(line.prefill_rate for line in lines)
        text.append(f"prefill: {best:,.0f} tok/s at best (goal: {published.PREFILL_GOAL:,})")
        text.append(f"* {published.PUBLISHED}")
    return "\n".join(text)


def run_gpu_offline(args: argparse.Namespace) -> None:
    lines = [Line(size, args.prompt_lens[0]) for size in args.batch_sizes]
    with dummy_model(args.shape) as folder:
        measure_static(lines, args, folder)
        info, profiles = uvloop.run(measure_loop(lines, args, folder))
    cells = [asdict(line) | {"prefill_tokens_per_s": line.prefill_rate, **goals(line, args)} for line in lines]
    finish(args, "gpu_offline", info, cells, profiles, make_table(lines, args, info))
