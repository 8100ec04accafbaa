"""Measures the scheduler's host time per turn: with and without cache reports, and of one-shots by policy. No model.

    python -m benchmarks.core.reporting_cost [--turns 1500] [--pages 1 64] [--cprofile reports|one-shots]

Two studies, both on a pool that is always full, so that each turn evicts KV of others:

    reports     turns of conversations, many more than fit; one scheduler without reports and history (off), one with
                both (on)
    one-shots   prompts that share a system prompt and never return; under fcfs without leases, handoff, and auto. After
                its end, each text is reported to be without tool calls, as the server does

All schedulers of a study get the same requests, one right after the other, in an order that rotates, so that other work
on the machine affects all of them. Requests run one at a time, 24 new tokens each. Times are CPU times of the thread:

    arrival     `add_request`
    steps       forming the steps and processing their results
    end         the report of the tool calls

Prints medians, and differences from the first scheduler with their 95 % interval (bootstrap over the turns, without the
slowest twentieth), as a share of its host time and of a turn on a device with --step-ms a step. Writes
benchmarks/results/reporting_cost.json. One thread.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.radix.cache import RadixCache
from baton.scheduler.batch import StepResult
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.outcome import missed_by_reason
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.scheduler import Scheduler
from baton.scheduler.token_buffer import pack_ids
from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.core.cache_server import random_ids

CONTEXT, OUTPUT, SYSTEM, PROMPTS, DRAWS = 4096, 24, 500, 20, 1000
TRIMMED = 0.95
"""Quantile of the turns that count."""
PARTS = ("arrival", "steps", "end")


@dataclass(frozen=True)
class Turn:
    rid: str
    prompt: np.ndarray
    output: np.ndarray


@dataclass(frozen=True)
class Arm:
    """A scheduler to measure. reports: with cache reports and a history."""

    name: str
    policy: str = "fcfs"
    reports: bool = True


STUDIES: dict[str, list[Arm]] = {
    "reports": [Arm("off", reports=False), Arm("on")],
    "one-shots": [Arm("fcfs"), Arm("handoff", "handoff"), Arm("auto", "auto")],
}


class Measured:
    """One scheduler, and the times of its turns."""

    def __init__(self, arm: Arm, pool: int, page_size: int, step_ms: float) -> None:
        history = SchedulerConfig().cache_history if arm.reports else 0.0
        config = SchedulerConfig(
            context_length=CONTEXT,
            max_total_tokens=pool,
            page_size=page_size,
            max_running_requests=8,
            schedule_policy=arm.policy,
            cache_history=history,
            random_seed=0,
        )
        rows, allocator = ReqToTokenPool(config.num_rows, CONTEXT), Allocator(pool, page_size)
        cache = RadixCache(rows, allocator, page_size=page_size)
        self.scheduler = Scheduler(config, rows, allocator, cache, ())
        if not arm.reports:
            self.scheduler._prefill._reporter = _NoReports()  # type: ignore[assignment]
        self.arm, self.cache = arm, cache
        self._step_s = step_ms / 1e3
        self._now = 0.0
        self.times: list[tuple[float, ...]] = []
        """µs of each turn, by part."""
        self.missed: dict[str, int] = {}

    def serve(self, turn: Turn) -> None:
        """Serve one request from its arrival to its end."""
        scheduler, now, results = self.scheduler, self._now, _results(turn.output)
        sampling = SamplingParams(max_new_tokens=len(turn.output), temperature=0.0, ignore_eos=True)
        spec = RequestSpec(
            rid=turn.rid, input_ids=pack_ids(turn.prompt), sampling=sampling, client="client", unasked=True
        )
        clock = time.thread_time_ns
        began = clock()
        request = scheduler.add_request(spec, now)[0]
        arrived = clock()
        for result in results:
            assert scheduler.next_batch(now) is not None
            now += self._step_s
            scheduler.process_result(result, now)
        stepped = clock()
        scheduler.record_tool_calls(turn.rid, 0, (), now)
        ended = clock()
        assert request.finish is not None and scheduler.is_idle
        self._now = now
        self.times.append(((arrived - began) / 1e3, (stepped - arrived) / 1e3, (ended - stepped) / 1e3))
        for reason, tokens in missed_by_reason(request.cache_report).items():
            self.missed[reason] = self.missed.get(reason, 0) + tokens


class _NoReports:
    def report_request(self, request: Any, now: float) -> None:
        pass


def _results(output: np.ndarray) -> list[StepResult]:
    return [StepResult.of_rows([[token]]) for token in output.tolist()]


def conversations(active: int, turns: int) -> Iterator[Turn]:
    """Turns of so many conversations, in random order; a conversation has eight, each with 75 to 225 new tokens."""
    rng, choose = np.random.default_rng(0), random.Random(0)
    systems = [random_ids(rng, SYSTEM) for _ in range(PROMPTS)]
    known: list[tuple[np.ndarray, int]] = [(systems[0], 8)] * active
    for number in range(turns):
        at = choose.randrange(active)
        before, done = known[at] if known[at][1] < 8 else (choose.choice(systems), 0)
        prompt = np.concatenate([before, random_ids(rng, choose.randint(75, 225))])
        output = random_ids(rng, OUTPUT)
        known[at] = np.concatenate([prompt, output]), done + 1
        yield Turn(f"turn{number}", prompt, output)


def one_shots(turns: int) -> Iterator[Turn]:
    """Prompts of a system prompt and 200 to 1200 tokens of their own."""
    rng, choose = np.random.default_rng(0), random.Random(0)
    systems = [random_ids(rng, SYSTEM) for _ in range(PROMPTS)]
    for number in range(turns):
        prompt = np.concatenate([choose.choice(systems), random_ids(rng, choose.randint(200, 1200))])
        yield Turn(f"turn{number}", prompt, random_ids(rng, OUTPUT))


def measure(study: str, page_size: int, args: argparse.Namespace) -> list[Measured]:
    arms = [Measured(arm, args.pool, page_size, args.step_ms) for arm in STUDIES[study]]
    total = args.turns + args.warm_up
    for number, turn in enumerate(conversations(args.active, total) if study == "reports" else one_shots(total)):
        if number == args.warm_up:
            gc.freeze()  # as the worker does
            for arm in arms:
                arm.times.clear()
                arm.missed.clear()
        first = number % len(arms)
        for arm in arms[first:] + arms[:first]:
            arm.serve(turn)
    if any(arm.cache.evicted_total < args.pool for arm in arms):
        raise SystemExit("the pool was not evicted once, so the figures say little: raise --turns or lower --pool")
    gc.unfreeze()
    return arms


def compare(arms: list[Measured], turn_ms: float) -> dict[str, Any]:
    """The figures of each arm, and how they differ from the first's. turn_ms: duration of a turn with its device."""
    base = np.array(arms[0].times)
    rows: dict[str, Any] = {}
    for arm in arms:
        mine = np.array(arm.times)
        row: dict[str, Any] = {"us": {part: float(np.median(mine[:, i])) for i, part in enumerate(PARTS)}}
        row["us"]["turn"] = float(np.median(mine.sum(axis=1)))
        row["missed_tokens"] = arm.missed
        if arm is not arms[0]:
            both = np.stack([base.sum(axis=1), mine.sum(axis=1)])
            usual = both[:, both.sum(axis=0) <= np.quantile(both.sum(axis=0), TRIMMED)]
            more, of = usual[1] - usual[0], usual[0]
            rng = np.random.default_rng(0)
            draws = rng.integers(0, len(more), (DRAWS, len(more)))
            low, high = np.quantile(more[draws].mean(axis=1), [0.025, 0.975]).tolist()
            row["more_us"] = {"mean": float(more.mean()), "low": low, "high": high}
            row["of_host"] = float(more.mean() / of.mean())
            row["of_turn"] = float(more.mean() / 1e3 / turn_ms)
        rows[arm.arm.name] = row
    return rows


def show(study: str, page_size: int, rows: dict[str, Any]) -> None:
    print(f"\n{study}, page {page_size}: median µs a turn")
    print(f"{'':10}" + "".join(f"{part:>9}" for part in (*PARTS, "turn")) + "   more than the first, mean")
    for name, row in rows.items():
        line = f"{name:10}" + "".join(f"{row['us'][part]:9.1f}" for part in (*PARTS, "turn"))
        if more := row.get("more_us"):
            span = f"({more['low']:.1f} to {more['high']:.1f})"
            line += f"   {more['mean']:7.1f} µs {span}, {row['of_host']:.1%} of the host"
            line += f" time, {row['of_turn']:.3%} of a turn"
        print(line)


def print_cprofile(study: str, args: argparse.Namespace) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(measure, study, args.pages[0], args)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(50)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--turns", type=int, default=1500)
    parser.add_argument("--warm-up", type=int, default=500, help="turns before those that count")
    parser.add_argument("--pool", type=int, default=65_536, help="tokens")
    parser.add_argument("--active", type=int, default=100, help="conversations at a time; the pool holds about 50")
    parser.add_argument(
        "--step-ms", type=float, default=11.5, help="of the device: a 40 M model on this CPU takes 11.5"
    )
    parser.add_argument("--cprofile", choices=list(STUDIES), help="only this study, with the first page size")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    if args.cprofile:
        print_cprofile(args.cprofile, args)
        return
    turn_ms = OUTPUT * args.step_ms
    report: dict[str, Any] = {**about_this_run("cpu"), "turn_ms": turn_ms, "cases": {}}
    for study in args.studies:
        for page_size in args.pages:
            rows = compare(measure(study, page_size, args), turn_ms)
            show(study, page_size, rows)
            report["cases"][f"{study} {page_size}"] = rows
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "reporting_cost.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
