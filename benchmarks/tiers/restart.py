"""Measures a restart: the part of a shared prompt that the new server finds on disk.

The server is stopped when everything is written. Then the files are dropped from the page cache, so that they are read
from the disk.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common.clients import Call, random_ids
from benchmarks.tiers.engines import HAS_DISK, NO_DISK, Maker, Pools, drop_page_cache, goal, written

GOAL_CACHED = 0.95


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Sizes in tokens."""

    shared: int
    user: int
    answer: int
    rounds: int

    @property
    def pools(self) -> Pools:
        whole = self.shared + self.user + self.answer
        return Pools(device=4 * whole, context=whole + 8, host=16 * whole)


async def serve(maker: Maker, work: Restart, disk: Path, shared: list[int], end: list[int]) -> dict[str, Any]:
    """Start, answer one request after a short other one, wait until all is written, stop."""
    engine = maker.make("disk", work.pools, disk=disk)
    await engine.open_session()
    try:
        await engine.send_call(Call(prompt=end[::-1], max_tokens=2))  # lazy initialisation
        reply = await engine.send_call(Call(prompt=shared + end, max_tokens=work.answer, stream=True))
        await written(disk)
    finally:
        await engine.close()
    return {"ttft_s": reply.ttft, "cached": reply.cached_tokens}


def serve_in_this_process(*arguments: Any) -> dict[str, Any]:
    return asyncio.run(serve(*arguments))


def run_round(maker: Maker, work: Restart, seed: int, disk: Path) -> dict[str, Any]:
    """The same prompt, with another end, before and after. Each in a process of its own."""
    rng = np.random.default_rng(seed)
    shared = random_ids(rng, work.shared, maker.vocab_size)
    found: dict[str, Any] = {}
    for when in ("before", "after"):
        end = random_ids(rng, work.user, maker.vocab_size)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found[when] = process.submit(serve_in_this_process, maker, work, disk, shared, end).result()
        drop_page_cache(disk)
    return found


async def measure(maker: Maker, work: Restart, seed: int) -> dict[str, Any]:
    report: dict[str, Any] = {"work": vars(work), "pools": vars(work.pools), "goals": [], "skipped": [], "rounds": []}
    if not HAS_DISK:
        report["skipped"].append(f"restart: {NO_DISK}")
        return report
    for number in range(work.rounds):
        with tempfile.TemporaryDirectory() as disk:
            report["rounds"].append(run_round(maker, work, seed + number, Path(disk)))
    least = min(found["after"]["cached"] for found in report["rounds"]) / work.shared
    report["goals"].append(goal("shared prompt found after a restart, least", least, GOAL_CACHED, at_least=True))
    return report


def show(report: dict[str, Any]) -> None:
    if not report["rounds"]:
        return
    print(f"\nrestart, a shared prompt of {report['work']['shared']}: TTFT of the first request that brings it")
    for when in ("before", "after"):
        found = [pair[when] for pair in report["rounds"]]
        ttft, cached = median(f["ttft_s"] for f in found), median(f["cached"] for f in found)
        print(f"{when:<10}{ttft * 1e3:>9.1f} ms{cached:>9.0f} tokens found")
