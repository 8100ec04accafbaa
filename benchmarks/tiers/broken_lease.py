"""Measures the second stage after its lease was broken, because other prompts took the whole pool.

    handoff    nothing came between; the lease is still there
    host       the lease broke, the KV is in host memory
    device     the lease broke, there is no tier: the whole prompt is computed again

Pairs hold 30 % of the pool and the other prompts need all of it, so the demand is 130 %.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common.clients import Call, Client
from benchmarks.tiers.engines import Maker, Pools, TierEngine, goal, turns

GOAL_RATIO = 1.5
"""TTFT from the host over that of a handoff."""
PAIR_SHARE = 0.3
OTHERS_ANSWER = 16
MODES = ("handoff", "host", "device")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Sizes in tokens."""

    prompt: int
    stage1: int
    suffix: int
    stage2: int
    pairs: int

    @property
    def whole(self) -> int:
        return self.prompt + self.stage1 + self.suffix + self.stage2

    @property
    def pools(self) -> Pools:
        device = int(self.whole / PAIR_SHARE)
        return Pools(device=device, context=self.whole + 64, host=3 * device)

    @property
    def others(self) -> list[int]:
        """Lengths of the prompts that take the pool, all running at once."""
        number = -(-self.pools.device // self.whole)
        return [self.pools.device // number - OTHERS_ANSWER - 2] * number


@dataclass
class Cell:
    mode: str
    ttft: list[float] = field(default_factory=list)
    """Seconds, of stage 2."""
    computed: list[int] = field(default_factory=list)
    paths: Counter[str] = field(default_factory=Counter)
    outputs: list[list[int]] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "ttft_median_ms": median(self.ttft) * 1e3,
            "ttft_p95_ms": float(np.percentile(self.ttft, 95)) * 1e3,
            "ttft_s": self.ttft,
            "computed": self.computed,
            "paths": dict(self.paths),
        }


async def run_pair(client: Client, work: Pair, cell: Cell, seed: int) -> None:
    await client.flush()
    rng = np.random.default_rng(seed)
    prompt, suffix = client.make_prompt(rng, work.prompt), client.make_prompt(rng, work.suffix)
    first = await client.send_call(Call(prompt=prompt, max_tokens=work.stage1, retain_ttl=3600.0))
    if first.refused:
        raise RuntimeError(f"stage 1 was not retained: {first.refused}")
    if cell.mode != "handoff":
        prompts = [client.make_prompt(rng, length) for length in work.others]
        await asyncio.gather(*(client.send_call(Call(prompt=p, max_tokens=OTHERS_ANSWER)) for p in prompts))
    reply = await client.send_call(Call(prompt=suffix, max_tokens=work.stage2, stream=True, parent=first.name))
    cell.ttft.append(reply.ttft)
    cell.computed.append(reply.prompt_tokens - (reply.cached_tokens or 0))
    cell.paths[reply.path or "none"] += 1
    cell.outputs.append(first.output + reply.output)


async def measure(maker: Maker, work: Pair, seed: int) -> dict[str, Any]:
    cells = {mode: Cell(mode) for mode in MODES}
    async with maker.running(("host", "device"), work.pools) as engines:
        of_mode: dict[str, TierEngine] = {mode: engines.get(mode, engines["host"]) for mode in MODES}
        for mode in MODES:
            await run_pair(of_mode[mode], work, Cell(mode), seed)
        title = f"leases broken, {work.prompt} tokens"
        for number, mode in tqdm(turns(MODES, work.pairs), title, unit="pair", leave=False):
            await run_pair(of_mode[mode], work, cells[mode], seed + 1 + number)
    times = {mode: median(cell.ttft) for mode, cell in cells.items()}
    ratio = times["host"] / times["handoff"]
    what = f"stage-2 TTFT from host / handoff, prompt {work.prompt}"
    return {
        "work": vars(work),
        "pools": vars(work.pools),
        "cells": [cell.report() for cell in cells.values()],
        "again_over_host": times["device"] / times["host"],
        "equal_outputs": {mode: cells[mode].outputs == cells["handoff"].outputs for mode in MODES},
        "goals": [goal(what, ratio, GOAL_RATIO, at_least=False)],
        "skipped": [],
    }


def show(report: dict[str, Any]) -> None:
    work = report["work"]
    print(
        f"\nstage 2 after a broken lease: prompt {work['prompt']}, stage 1 {work['stage1']}, suffix {work['suffix']}; "
        f"{report['pools']['device']} tokens on the device, 130 % wanted"
    )
    print(f"{'mode':<10}{'TTFT ms':>9}{'p95':>9}{'computed':>10}{'same answers':>14}  paths")
    for cell in report["cells"]:
        paths = ", ".join(f"{count} {path}" for path, count in cell["paths"].items())
        print(
            f"{cell['mode']:<10}{cell['ttft_median_ms']:>9.1f}{cell['ttft_p95_ms']:>9.1f}"
            f"{median(cell['computed']):>10.0f}{report['equal_outputs'][cell['mode']]!s:>14}  {paths}"
        )
