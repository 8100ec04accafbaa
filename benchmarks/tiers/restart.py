"""A server that is stopped and started again: what of a shared prompt the new one finds on disk."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common.clients import Call
from benchmarks.tiers.engines import HAS_DISK, NO_DISK, SETTLE_S, Maker, Pools, goal

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


async def run_round(maker: Maker, work: Restart, seed: int, disk: Path) -> dict[str, Any]:
    """The same prompt, with another end, before and after."""
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    shared: list[int] = []
    for when in ("before", "after"):
        engine = maker.make("disk", work.pools, disk=disk)
        await engine.open()
        try:
            shared = shared or engine.make_prompt(rng, work.shared)
            await engine.generate(Call(prompt=engine.make_prompt(rng, 16), max_tokens=2))
            prompt = shared + engine.make_prompt(rng, work.user)
            reply = await engine.generate(Call(prompt=prompt, max_tokens=work.answer, stream=True))
            await asyncio.sleep(SETTLE_S)
        finally:
            await engine.close()
        found[when] = {"ttft_s": reply.ttft, "cached": reply.cached_tokens}
    return found


async def measure(maker: Maker, work: Restart, seed: int) -> dict[str, Any]:
    report: dict[str, Any] = {"work": vars(work), "pools": vars(work.pools), "goals": [], "skipped": [], "rounds": []}
    if not HAS_DISK:
        report["skipped"].append(f"restart: {NO_DISK}")
        return report
    for number in range(work.rounds):
        with tempfile.TemporaryDirectory() as disk:
            report["rounds"].append(await run_round(maker, work, seed + number, Path(disk)))
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
