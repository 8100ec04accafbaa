"""Tools that run for a share of the fill time, which the server has measured itself, while others take its memory; and
what its trace says of the turns behind them.

python -m tests.doubles.pressed_tools URL PAGES     a tool of another program; PAGES: of the server's pool
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from .page_flood import PageFlood
from .tool_loops import TurnUsage

SHARES = (0.2, 0.6, 0.4)
"""How long the tools take, one after the other, as shares of the fill time (the break-even time of idle KV)."""


def fill_time_s(url: str) -> float:
    """As the server reports it."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("baton:fill_time_seconds{"))


def measure_fill_time(url: str, flood: PageFlood) -> None:
    """Send prompts until the server has measured it."""
    while httpx.get(f"{url}/cache/tiers").json()["device"]["prefill_tokens_per_s"] is None:
        flood.fill_pool()
        time.sleep(0.2)


@dataclass
class PressedTool:
    """Waits for an agent's tools, and fills the pool before they return."""

    url: str
    flood: PageFlood
    fill_times_s: list[float] = field(default_factory=list)
    """The fill time at the start of each call."""

    def wait(self) -> None:
        fill_s, share = fill_time_s(self.url), SHARES[len(self.fill_times_s) % len(SHARES)]
        self.fill_times_s.append(fill_s)
        time.sleep(share * fill_s)
        self.flood.fill_pool()


@dataclass
class TracedJob:
    """turns: its requests. away_s: before each of them, the seconds from the end of the one before, by the server's
    clock; 0 for the first."""

    turns: list[TurnUsage] = field(default_factory=list)
    away_s: list[float] = field(default_factory=list)


def traced_jobs(trace: Path) -> list[TracedJob]:
    """By the file of ``--scheduler-trace``, in order of arrival."""
    jobs: dict[str, TracedJob] = {}
    for event in map(json.loads, trace.read_text().splitlines()):
        _record_event(jobs, event)
    return list(jobs.values())


def job_of(turns: list[TurnUsage], trace: Path) -> TracedJob | None:
    """The last job with just these turns; None until the file has it."""
    return next((job for job in reversed(traced_jobs(trace)) if job.turns == turns), None)


def _record_event(jobs: dict[str, TracedJob], event: dict[str, Any]) -> None:
    job = jobs.setdefault(event.get("job_id", ""), TracedJob())
    if event["event"] == "returned":
        job.away_s.append(event["seconds"])
    elif event["event"] == "departure":
        job.away_s += [0.0] * (len(job.turns) + 1 - len(job.away_s))
        job.turns.append(TurnUsage(event["prompt_tokens"], event["hit_tokens"], event["output_tokens"]))


def behind_short_tools(
    turns: list[TurnUsage], fill_times_s: dict[int, float], found: list[int], trace: Path
) -> list[int]:
    """``found`` of the turns behind a tool that took less than the fill time. turns: of an agent. fill_times_s: by the
    number of the turn behind a tool, when that began. found: by turn."""
    job = job_of(turns, trace)
    assert job is not None, "no job has these turns"
    print([f"{job.away_s[number]:.2f} of {fill_s:.2f} s: {found[number]}" for number, fill_s in fill_times_s.items()])
    return [found[number] for number, fill_s in fill_times_s.items() if job.away_s[number] < fill_s]


if __name__ == "__main__":
    PressedTool(sys.argv[1], PageFlood(sys.argv[1], "program", int(sys.argv[2]))).wait()
