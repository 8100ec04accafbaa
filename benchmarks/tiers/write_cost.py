"""Measures the cost of write-through for traffic that needs no tier: everything fits the device, and is copied to the
host anyway.

On a CPU the scheduler's thread also runs the model, which takes nearly all of its time and varies by more than the tier
costs. So its other work is also measured alone, as the sum of all phases of its steps except the launch. Both are
shares of all its time.

Three engines take turns: one without a tier, one with it, and a second one without. The tier's cost is the difference
to the mean of the runs before and after, so that a steady slowdown of the machine does not count. The difference
between the two equal engines shows the noise of this machine.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common.clients import Call
from benchmarks.common.intervals import half_width
from benchmarks.tiers.engines import SETTLE_S, Maker, Pools, TierEngine, goal, turns

ENGINES = ("device", "host", "device again")
MEASURES = ("cpu_s", "host_s", "wall_s", "process_cpu_s")
"""CPU of the scheduler's thread, of that its own work, wall, CPU of all threads."""
GOAL_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Clients that each send a prompt, and then go on from the answer. Sizes in tokens."""

    clients: int
    prompt: int
    user: int
    """Tokens of the second turn."""
    answer: int
    each: int
    """Conversations of a client, one after the other."""
    pairs: int
    """Rounds."""

    @property
    def longest(self) -> int:
        return self.prompt + self.user + 2 * self.answer

    @property
    def pools(self) -> Pools:
        everything = self.clients * self.each * self.longest
        return Pools(
            device=everything * 5 // 4, context=self.longest + 8, host=everything * 3 // 2, max_running=self.clients
        )


@dataclass
class Run:
    seconds: dict[str, float]
    """By measure."""
    phases: dict[str, float]
    """Seconds of all steps; and the number of ``steps``."""
    answers: list[list[int]]
    """In order of their prompts."""


async def run_traffic(engine: TierEngine, work: Traffic, seed: int) -> Run:
    await engine.flush()
    rng = np.random.default_rng(seed)
    sizes = (work.prompt, work.user)
    said = [[engine.make_prompt(rng, size) for size in sizes] for _ in range(work.clients * work.each)]
    answers: list[list[int]] = [[] for _ in said]

    async def client(number: int) -> None:
        for talk in range(number, len(said), work.clients):
            prompt: list[int] = []
            for words in said[talk]:
                prompt += words
                reply = await engine.send_call(Call(prompt=prompt, max_tokens=work.answer, stream=True))
                prompt = prompt + reply.output
                answers[talk] += reply.output

    await engine.start_profile()
    cpu, process, began = engine.cpu_s(), time.process_time(), time.perf_counter()
    await asyncio.gather(*map(client, range(work.clients)))
    wall = time.perf_counter() - began
    await asyncio.sleep(SETTLE_S)  # what comes late counts as CPU time all the same
    seconds = {"cpu_s": engine.cpu_s() - cpu, "wall_s": wall, "process_cpu_s": time.process_time() - process}
    profile = (await engine.stop_profile())["kinds"]["all"]
    phases = {phase: times["total"] / 1e3 for phase, times in profile["phases_ms"].items()}
    seconds["host_s"] = sum(phases.values()) - phases["launch"]
    return Run(seconds, phases | {"steps": profile["steps"]}, answers)


def difference(ours: list[float], theirs: list[float], wholes: list[float]) -> dict[str, float]:
    """Differences of pairs as a share of a whole: (mean, half-width of its 95 % confidence interval, median)."""
    shares = [(a - b) / whole for a, b, whole in zip(ours, theirs, wholes, strict=True)]
    return {"mean": mean(shares), "half_width": half_width(shares), "median": median(shares)}


def compare(seconds: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Differences by engine and measure: of the tier's engine to the mean of the others, and between those."""
    first, ours, last = (seconds[name] for name in ENGINES)
    plain = {kind: [mean(pair) for pair in zip(first[kind], last[kind], strict=True)] for kind in MEASURES}
    wholes = plain | {"host_s": plain["cpu_s"]}
    return {
        "host": {kind: difference(ours[kind], plain[kind], wholes[kind]) for kind in MEASURES},
        "device again": {kind: difference(last[kind], first[kind], wholes[kind]) for kind in MEASURES},
    }


async def measure(maker: Maker, work: Traffic, seed: int) -> dict[str, Any]:
    runs: dict[str, list[Run]] = {name: [] for name in ENGINES}
    async with maker.running(ENGINES, work.pools) as engines:
        for engine in engines.values():
            await run_traffic(engine, work, seed)
        for number, name in tqdm(turns(ENGINES, work.pairs), "write-through", unit="run", leave=False):
            runs[name].append(await run_traffic(engines[name], work, seed + number))
    seconds = {name: {kind: [run.seconds[kind] for run in runs[name]] for kind in MEASURES} for name in ENGINES}
    differences = compare(seconds)
    cost = differences["host"]
    phases = {name: {key: mean(run.phases[key] for run in runs[name]) for key in runs[name][0].phases} for name in runs}
    return {
        "work": vars(work),
        "pools": vars(work.pools),
        "seconds": seconds,
        "differences": differences,
        "phases_s": phases,
        "equal_outputs": mean(ours.answers == theirs.answers for ours, theirs in zip(runs["host"], runs["device"])),
        "goals": [
            goal(
                f"write-through, {what}",
                cost[kind]["mean"],
                GOAL_SHARE,
                at_least=False,
                half_width=cost[kind]["half_width"],
            )
            for what, kind in (
                ("all of the scheduler's thread", "cpu_s"),
                ("its own work by all of its time", "host_s"),
            )
        ],
        "skipped": [],
    }


def show(report: dict[str, Any]) -> None:
    work = report["work"]
    print(
        f"\nwrite-through on traffic that fits the device: {work['clients']} clients, prompts of {work['prompt']}, "
        f"then {work['user']} more, answers of {work['answer']}; {work['pairs']} rounds"
    )
    headings = ("scheduler CPU", "without the model", "wall", "all CPU")
    print(f"{'more than no tier':<18}" + "".join(f"{name:>20}" for name in headings))
    for name, kinds in report["differences"].items():
        cells = [f"{100 * kinds[m]['mean']:+.2f} ± {100 * kinds[m]['half_width']:.2f} %" for m in MEASURES]
        print(f"{name:<18}" + "".join(f"{cell:>20}" for cell in cells))
    print(f"\n{'CPU ms per step':<18}" + "".join(f"{name:>10}" for name in report["phases_s"]["host"]))
    for name, phases in report["phases_s"].items():
        steps = phases["steps"]
        print(
            f"{name:<18}"
            + "".join(f"{1e3 * value / steps:>10.3f}" for phase, value in phases.items() if phase != "steps")
            + f"{steps:>10.0f}"
        )
