"""Measures the cost of recognizing jobs by token ids (docs/design/agents.md#which-job-a-request-belongs-to).

    python -m benchmarks.core.recognition [--runs 200] [--turns 4096]

The table of finished turns is full. For prompts of several lengths, prints the median time in µs of
    new       the look-up of a prompt that extends no turn, as each one-shot's does
    extends   the look-up of a prompt that extends one
    record    the record of a turn at its end
Writes benchmarks/results/recognition.json. One thread; CPU time of the thread, so that other work on the machine counts
little.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import numpy as np

from baton.scheduler.jobs.finished_turns import MAX_TURNS, FinishedTurns
from benchmarks.common.measured import RESULTS, commit
from benchmarks.core.cache_server import random_ids

LENGTHS = (1_000, 10_000, 100_000)
OUTPUT = 100


class Clock:
    """Collects CPU times of the thread in µs, by name."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.thread_time_ns()
        yield
        self.times.setdefault(name, []).append((time.thread_time_ns() - started) / 1e3)


def measure_length(length: int, turns: int, runs: int, rng: np.random.Generator) -> dict[str, float]:
    table, clock = FinishedTurns(turns), Clock()
    for number in range(turns):
        table.record_turn("", "", (f"other {number}", 0), "job", random_ids(rng, 50), random_ids(rng, OUTPUT))
    for number in range(runs):
        prompt, output = random_ids(rng, length), random_ids(rng, OUTPUT)
        following = np.concatenate([prompt, output, random_ids(rng, OUTPUT)])
        with clock.measure("new"):
            table.find_turn("", "", prompt)
        with clock.measure("record"):
            table.record_turn("", "", (f"{number}", 0), "job", prompt, output)
        with clock.measure("extends"):
            table.find_turn("", "", following)
    return {name: round(median(each), 1) for name, each in clock.times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="look-ups and records of each length")
    parser.add_argument("--turns", type=int, default=MAX_TURNS, help="turns on record")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    rows = {length: measure_length(length, args.turns, args.runs, rng) for length in LENGTHS}
    print(f"µs, median of {args.runs}; {args.turns} turns on record")
    print(f"{'prompt':>8} {'new':>8} {'extends':>8} {'record':>8}")
    for length, row in rows.items():
        print(f"{length:8} {row['new']:8.1f} {row['extends']:8.1f} {row['record']:8.1f}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    found = {"commit": commit(), "processor": platform.processor(), "turns": args.turns, "us": rows}
    (RESULTS / "recognition.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
