"""Measures conversations that exceed the device's pool: the KV of each that is still cached, and the time to first
token.

With a disk tier, the host has room for less than a third of the conversations; between turns the files are dropped from
the page cache, so that they are read from the disk.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common.clients import Call
from benchmarks.tiers.engines import NO_DISK, Maker, Pools, TierEngine, goal, tiers_to_compare, turns

TIMES_THE_DEVICE = 4
"""The working set by the device's pool."""
GOAL_HITS = 0.95
GOAL_RATIO = {"host": 3.0, "disk": 2.0}
"""Mean TTFT of computing again over that of a tier."""


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Sizes in tokens."""

    number: int
    first: int
    """Tokens of each conversation's first prompt."""
    user: int
    """New tokens of each later turn."""
    answer: int
    turns: int
    at_once: int
    rounds: int

    @property
    def longest(self) -> int:
        return self.first + (self.turns - 1) * self.user + self.turns * self.answer

    @property
    def pools(self) -> Pools:
        working_set = self.number * self.longest
        return Pools(
            device=working_set // TIMES_THE_DEVICE,
            context=self.longest + 8,
            host=working_set * 5 // 4,
            max_running=self.at_once,
        )


@dataclass
class Cell:
    """One engine, over all rounds. Lists by turn."""

    engine: str
    ttft: list[list[float]]
    """Seconds."""
    cached: list[int]
    """Tokens found, of all conversations and rounds."""
    reusable: list[int]
    """Tokens that were computed in earlier turns of the same conversation."""
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def hits(self) -> float:
        """Share of the reusable tokens that were found."""
        return sum(self.cached) / sum(self.reusable)

    @property
    def later_ttft(self) -> list[float]:
        """Times to the first token of all turns but the first, which finds nothing."""
        return [seconds for turn in self.ttft[1:] for seconds in turn]

    def report(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "hits": self.hits,
            "ttft_mean_ms": mean(self.later_ttft) * 1e3,
            "ttft_p95_ms": float(np.percentile(self.later_ttft, 95)) * 1e3,
            "ttft_s": self.ttft,
            "cached": self.cached,
            "reusable": self.reusable,
        }


async def run_round(client: TierEngine, work: Conversations, cell: Cell, seed: int) -> None:
    """All turns of all conversations, round-robin, ``at_once`` at a time. The prompts depend on the seed alone."""
    await client.flush()
    rng = np.random.default_rng(seed)
    sizes = [work.first] + [work.user] * (work.turns - 1)
    said = [[client.make_prompt(rng, size) for size in sizes] for _ in range(work.number)]
    so_far: list[list[int]] = [[] for _ in said]

    async def take_turn(number: int, turn: int) -> None:
        prompt = so_far[number] + said[number][turn]
        reply = await client.send_call(Call(prompt=prompt, max_tokens=work.answer, stream=True))
        cell.ttft[turn].append(reply.ttft)
        cell.cached[turn] += reply.cached_tokens or 0
        cell.reusable[turn] += max(0, len(so_far[number]) - 1)  # the last token of an answer is not computed
        so_far[number] = prompt + reply.output
        cell.outputs.append(reply.output)

    for turn in range(work.turns):
        client.drop_page_cache()
        for first in range(0, work.number, work.at_once):
            together = range(first, min(first + work.at_once, work.number))
            await asyncio.gather(*(take_turn(number, turn) for number in together))


async def measure(maker: Maker, work: Conversations, seed: int) -> dict[str, Any]:
    names = tiers_to_compare()
    cells = {name: Cell(name, [[] for _ in range(work.turns)], [0] * work.turns, [0] * work.turns) for name in names}
    async with maker.running(names, work.pools) as engines:
        for name, engine in engines.items():  # lazy initialisation
            few = Conversations(number=1, first=16, user=4, answer=2, turns=2, at_once=1, rounds=1)
            await run_round(engine, few, Cell(name, [[], []], [0, 0], [0, 0]), seed)
        for number, name in tqdm(turns(names, work.rounds), "conversations", unit="round", leave=False):
            await run_round(engines[name], work, cells[name], seed + number)
    plain = cells["device"]
    again = mean(plain.later_ttft)
    report: dict[str, Any] = {"work": vars(work), "pools": vars(work.pools), "goals": [], "skipped": []}
    report["cells"] = [cell.report() for cell in cells.values()]
    for cell, answered in zip(cells.values(), report["cells"]):
        pairs = list(zip(cell.outputs, plain.outputs, strict=True)) if work.at_once == 1 else []
        answered["equal_outputs"] = mean(ours == theirs for ours, theirs in pairs) if pairs else None
        answered["times_faster"] = again / mean(cell.later_ttft)
    for name in names[1:]:
        report["goals"] += [
            goal(f"reusable tokens found, {name}", cells[name].hits, GOAL_HITS, at_least=True),
            goal(
                f"TTFT of computing again / from {name}",
                again / mean(cells[name].later_ttft),
                GOAL_RATIO[name],
                at_least=True,
            ),
        ]
    if "disk" not in names:
        report["skipped"].append(f"multi-turn from disk: {NO_DISK}")
    return report


def show(report: dict[str, Any]) -> None:
    work, pools = report["work"], report["pools"]
    print(
        f"\n{work['number']} conversations, {work['turns']} turns, up to {pools['context'] - 8} tokens each; "
        f"{pools['device']} tokens on the device; {work['at_once']} at once"
    )
    print(f"{'engine':<10}{'hits':>8}{'TTFT ms, mean':>15}{'p95':>9}{'times faster':>14}{'same answers':>14}")
    for cell in report["cells"]:
        equal = "-" if cell["equal_outputs"] is None else f"{100 * cell['equal_outputs']:.1f}%"
        print(
            f"{cell['engine']:<10}{100 * cell['hits']:>7.1f}%{cell['ttft_mean_ms']:>15.1f}{cell['ttft_p95_ms']:>9.1f}"
            f"{cell['times_faster']:>14.1f}{equal:>14}"
        )
