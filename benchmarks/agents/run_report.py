"""The JSON report of one run, and the table of several."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.agents.job_runner import JobResult, TurnResult

SCHEMA = 2
"""Version of the JSON; increased when a key changes its meaning."""

PERCENTILES = (50, 90, 95, 99)


def spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """``avg_NAME_s`` and percentiles (linear between the two nearest values); None without values."""
    found: dict[str, float | None] = {f"avg_{name}_s": fmean(values) if values else None}
    for percent in PERCENTILES:
        found[f"p{percent}_{name}_s"] = float(np.percentile(values, percent)) if values else None
    return found


def summarize(results: Sequence[JobResult]) -> dict[str, Any]:
    """The figures of a run. Durations count the jobs that ended; tokens and turns count all answered turns."""
    ended = [result for result in results if result.duration is not None]
    turns = [turn for result in results for turn in result.turns]
    told = [turn for turn in turns if turn.cached_tokens is not None]
    asked = [turn.followed for turn in turns if turn.followed is not None]
    durations = [result.duration for result in ended if result.duration is not None]
    services = [result.service for result in ended if result.service is not None]
    return {
        "jobs": len(results),
        "jobs_done": len(ended),
        "jobs_failed": sum(result.error is not None for result in results),
        "jobs_cut_off": sum(result.error is None and result.duration is None for result in results),
        "errors": dict(Counter(result.error for result in results if result.error is not None)),
        **spread("duration", durations),
        **spread("service", services),
        **spread("ttft", [turn.ttft for turn in turns]),
        "per_turn_avg_ttft_ms": by_turn(results, lambda turn: 1e3 * turn.ttft),
        "per_turn_avg_latency_ms": by_turn(results, lambda turn: 1e3 * turn.latency),
        "per_turn_avg_prompt_tokens": by_turn(results, lambda turn: turn.prompt_tokens),
        "per_turn_avg_cached_tokens": by_turn(results, lambda turn: turn.cached_tokens),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "output_tokens": sum(turn.output_tokens for turn in turns),
        "cached_tokens": sum(turn.cached_tokens or 0 for turn in told) if told else None,
        "reusable_tokens": sum(turn.reusable_tokens for turn in turns),
        "recomputed_tokens": sum(recomputed(turn) for turn in told) if told else None,
        "followed": fmean(asked) if asked else None,
        "job_durations": durations,
        "job_service_times": services,
    }


def recomputed(turn: TurnResult) -> int:
    """Tokens that the job's last turn had computed and that were computed again."""
    return max(0, turn.reusable_tokens - (turn.cached_tokens or 0))


def by_turn(results: Sequence[JobResult], value: Callable[[TurnResult], float | None]) -> dict[str, float]:
    """Means over jobs, by the turn's number from 1 on."""
    found: dict[str, list[float]] = {}
    for result in results:
        for number, turn in enumerate(result.turns, 1):
            if (each := value(turn)) is not None:
                found.setdefault(str(number), []).append(each)
    return {number: fmean(values) for number, values in found.items()}


def read_runs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The runs in these files, and in all files of these folders that hold one. Raises ValueError for a file that was
    named and holds none."""
    runs = []
    for path in paths:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            run = json.loads(file.read_text())
            if isinstance(run, dict) and run.get("schema") == SCHEMA and "policy" in run and "jps" in run:
                runs.append(run)
            elif file is path:
                raise ValueError(f"{file} is no run of benchmarks.agents.agent_jobs (schema {SCHEMA})")
    return runs


def show(runs: Sequence[dict[str, Any]]) -> None:
    """A line for each run, by load."""
    print(
        f"\n{'policy':<16}{'JPS':>6}{'done':>6}{'of':>5} |{'mean':>8}{'p50':>8}{'p95':>8}{'p99':>8} |"
        f"{'service':>8}{'p95':>8} |{'TTFT ms':>8}{'hits':>6}{'again':>8}{'KV max':>8}"
    )
    for run in sorted(runs, key=lambda run: (run["jps"], run["policy"], run["round"])):
        hits = run["cached_tokens"] / run["prompt_tokens"] if run["cached_tokens"] is not None else None
        usage = run["kv_usage"]["max"] if run["kv_usage"] else None
        times = ("avg_duration_s", "p50_duration_s", "p95_duration_s", "p99_duration_s")
        print(
            f"{run['policy']:<16}{run['jps']:>6g}{run['jobs_done']:>6}{run['jobs']:>5} |"
            + "".join(_cell(run[name], 8, ".2f") for name in times)
            + f" |{_cell(run['avg_service_s'], 8, '.2f')}{_cell(run['p95_service_s'], 8, '.2f')}"
            + f" |{_cell(_times(run['avg_ttft_s'], 1e3), 8, '.0f')}{_cell(_times(hits, 100), 5, '.0f')}%"
            + f"{_cell(run['recomputed_tokens'], 8, 'd')}{_cell(_times(usage, 100), 7, '.0f')}%"
        )
        for error, count in run["errors"].items():
            print(f"    {count} failed: {error}")
    print("Times in seconds. service: without the time of the tools. again: tokens that an earlier turn had computed.")


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}{form}}"
