"""What write-through costs traffic that needs no tier: everything fits the device, and is copied to the host anyway.

Three engines in turn: without a tier, with one, and a second without one, which says what two equal engines differ by
on this machine.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common.clients import Call
from benchmarks.tiers.engines import SETTLE_S, Maker, Pools, TierEngine, goal, turns

ENGINES = ("device", "host", "device again")
MEASURES = ("cpu_s", "wall_s", "process_cpu_s")
GOAL_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Clients that each send a prompt, and then go on from the answer. Sizes in tokens."""

    clients: int
    prompt: int
    user: int
    """Of the second turn."""
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


async def run_traffic(engine: TierEngine, work: Traffic, seed: int) -> tuple[dict[str, float], list[list[int]]]:
    """Seconds by measure, and the answers in order of their prompts."""
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
                reply = await engine.generate(Call(prompt=prompt, max_tokens=work.answer, stream=True))
                prompt = prompt + reply.output
                answers[talk] += reply.output

    cpu, process, began = engine.cpu_s(), time.process_time(), time.perf_counter()
    await asyncio.gather(*map(client, range(work.clients)))
    wall = time.perf_counter() - began
    await asyncio.sleep(SETTLE_S)  # what comes late counts as CPU time all the same
    return {"cpu_s": engine.cpu_s() - cpu, "wall_s": wall, "process_cpu_s": time.process_time() - process}, answers


def difference(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Of pairs, as a share of theirs: the mean, half the width of its 95 % confidence interval, and the median."""
    shares = [a / b - 1 for a, b in zip(ours, theirs, strict=True)]
    spread = student(len(shares) - 1) * stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.inf
    return {"mean": mean(shares), "half_width": spread, "median": median(shares)}


def student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t: Cornish and Fisher's series, good to 1 % from 5 degrees of freedom up."""
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees ** (i + 1) for i, term in enumerate(terms))


async def measure(maker: Maker, work: Traffic, seed: int) -> dict[str, Any]:
    seconds: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in MEASURES} for name in ENGINES}
    answers: dict[str, list[list[int]]] = {name: [] for name in ENGINES}
    phases: dict[str, dict[str, Any]] = {}
    async with maker.running(ENGINES, work.pools) as engines:
        for engine in engines.values():
            await run_traffic(engine, work, seed)
        for number, name in tqdm(turns(ENGINES, work.pairs), "write-through", unit="run", leave=False):
            taken, said = await run_traffic(engines[name], work, seed + number)
            for kind, value in taken.items():
                seconds[name][kind].append(value)
            answers[name] += said
        for name, engine in engines.items():
            await engine.start_profile()
            await run_traffic(engine, work, seed)
            phases[name] = totals((await engine.stop_profile())["kinds"]["all"])
    plain = seconds["device"]
    differences = {
        name: {kind: difference(seconds[name][kind], plain[kind]) for kind in MEASURES} for name in ENGINES[1:]
    }
    cost = differences["host"]["cpu_s"]
    what = f"write-through, CPU of the scheduler's thread (± {100 * cost['half_width']:.2f} points)"
    return {
        "work": vars(work),
        "pools": vars(work.pools),
        "seconds": seconds,
        "differences": differences,
        "phases": phases,
        "equal_outputs": mean(a == b for a, b in zip(answers["host"], answers["device"], strict=True)),
        "goals": [goal(what, cost["mean"], GOAL_SHARE, at_least=False)],
        "skipped": [],
    }


def totals(group: dict[str, Any]) -> dict[str, float]:
    """Of a profile: milliseconds of all steps, by phase."""
    phases = {phase: times.get("total", 0.0) for phase, times in group["phases_ms"].items()}
    return phases | {"steps": group["steps"], "all": group["step_ms"]["total"]}


def show(report: dict[str, Any]) -> None:
    work = report["work"]
    print(
        f"\nwrite-through on traffic that fits the device: {work['clients']} clients, prompts of {work['prompt']}, "
        f"then {work['user']} more, answers of {work['answer']}; {work['pairs']} rounds"
    )
    print(f"{'against no tier':<18}" + "".join(f"{name:>24}" for name in ("scheduler CPU", "wall", "process CPU")))
    for name, kinds in report["differences"].items():
        cells = [f"{100 * kinds[m]['mean']:+.2f} ± {100 * kinds[m]['half_width']:.2f} %" for m in MEASURES]
        print(f"{name:<18}" + "".join(f"{cell:>24}" for cell in cells))
    print("phases of one more run, ms in all: " + ", ".join(next(iter(report["phases"].values()))))
    for name, phases in report["phases"].items():
        print(f"{name:<18}" + " ".join(f"{value:>9.1f}" for value in phases.values()))
