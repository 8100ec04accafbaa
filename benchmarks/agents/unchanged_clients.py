"""Compares clients that name no jobs, under the default policy, with the same jobs named, and with fcfs.

    python -m benchmarks.agents.unchanged_clients --model build/models/SmolLM2-135M-Instruct
    python -m benchmarks.agents.unchanged_clients --model FOLDER --loads 1.3 --seeds 6 --duration 180

    arm       policy     the client sends
    fcfs      fcfs       plain chats
    plain     auto       plain chats
    auto      auto       the same chats, with job_id and is_last_step
    named     handoff    the same chats, with job_id and is_last_step

`plain` against `auto` shows what names and announced ends are worth, `auto` against `named` what the policy costs.

Each arm has a server of its own, with a pool for ``--conversations`` of the workload's conversations. It serves other
jobs for ``--warm-up`` seconds, and then all runs of its arm; only one server has work at a time. ``--loads`` are shares
of saturation: the rate at which fcfs finishes jobs while as many run as the pool has room for, with tools that take no
time. (More at a time, and it computes much again, so it sustains less than that.) For each
seed and load the arms get the same jobs, in an order that is swapped with every seed. The table compares the mean
service times (a job's duration less that of its tools) of two arms seed by seed: the mean of the ratios, and its 95 %
interval (Student's t, over seeds). `followed` is the share of answers from which the server reads the call that was
asked for, or none where none was; the arms say little about agents where it is low, and a warning says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.agents.job_runner import Server, run_jobs
from benchmarks.agents.run_report import summarize
from benchmarks.agents.workload import DEFAULT_TURNS, WORKLOADS, Job, Sizes, plan, plan_jobs
from benchmarks.common.intervals import half_width
from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.servers import Server as OwnServer


class Arm(NamedTuple):
    """plain: its client sends neither job_id nor is_last_step."""

    name: str
    policy: str
    plain: bool


ARMS = (
    Arm("fcfs", "fcfs", True),
    Arm("plain", "auto", True),
    Arm("auto", "auto", False),
    Arm("named", "handoff", False),
)

COMPARED = (("plain", "named"), ("plain", "auto"), ("auto", "named"), ("plain", "fcfs"), ("named", "fcfs"))

WARM_UP_LOAD = 0.7
"""Share of saturation while a server warms up."""

OTHER = 1_000_000
"""Added to a seed: that of the jobs of the warm-up."""

BURST = 36
"""Jobs by which saturation is measured."""


FOLLOWED_AT_LEAST = 0.9
"""Share of answers that do what they were asked to; with fewer, the comparison says little about agents."""


def pool_tokens(jobs: Sequence[Job], conversations: float) -> int:
    """Tokens of so many conversations at their ends, on average. The examples that they share count once."""
    shared = jobs[0].example_tokens
    ends = [job.turns[-1].prompt_tokens + job.turns[-1].max_tokens for job in jobs]
    return shared + round(conversations * (fmean(ends) - shared))


class ArmServer(NamedTuple):
    """The server of an arm."""

    arm: Arm
    url: str

    def run(self, args: argparse.Namespace, jobs: Sequence[Job], seed: int) -> dict[str, Any]:
        """The figures of one run (run_report.py)."""
        return asyncio.run(self._run(args, jobs, seed)) | {"arm": self.arm.name, "seed": seed}

    async def _run(self, args: argparse.Namespace, jobs: Sequence[Job], seed: int) -> dict[str, Any]:
        async with Server(self.url, "none", plain=self.arm.plain, timeout_s=args.timeout) as server:
            with tqdm(total=len(jobs), desc=self.arm.name, unit="job", leave=False, disable=None) as bar:
                started = asyncio.get_running_loop().time()
                results = await run_jobs(server, list(jobs), seed, args.drain, bar.update)
                return {"took_s": asyncio.get_running_loop().time() - started} | summarize(results)

    def saturation(self, args: argparse.Namespace, jobs: Sequence[Job]) -> float:
        """Jobs a second, of which ``--conversations`` run at a time."""
        return asyncio.run(self._saturation(args, jobs))

    async def _saturation(self, args: argparse.Namespace, jobs: Sequence[Job]) -> float:
        waiting = list(jobs)

        async def lane() -> None:
            while waiting:
                await run_jobs(server, [waiting.pop()], args.seed, args.drain, lambda: None)

        async with Server(self.url, "none", plain=self.arm.plain, timeout_s=args.timeout) as server:
            started = asyncio.get_running_loop().time()
            await asyncio.gather(*(lane() for _ in range(round(args.conversations))))
            return len(jobs) / (asyncio.get_running_loop().time() - started)


def start_servers(args: argparse.Namespace, pool: int, stack: contextlib.ExitStack) -> list[ArmServer]:
    """One for each arm, in their order; the stack closes them."""
    servers = []
    for arm in ARMS:
        own = OwnServer(args.model, ("--schedule-policy", arm.policy, "--max-total-tokens", str(pool), *args.flag))
        stack.callback(own.close)
        servers.append(ArmServer(arm, own.url))
    return servers


def measure(args: argparse.Namespace) -> dict[str, Any]:
    turns = args.turns or DEFAULT_TURNS[args.workload]
    sizes = Sizes(turns=turns, time=args.time_scale, tokens=args.token_scale, longest_tool_s=args.longest_tool)
    pool = pool_tokens(plan_jobs(args.workload, sizes, 100, args.seed), args.conversations)
    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        servers = start_servers(args, pool, stack)
        if (rate := args.saturation) is None:
            quick = Sizes(turns=turns, time=1e-6, tokens=args.token_scale)
            rate = servers[0].saturation(args, plan_jobs(args.workload, quick, BURST, args.seed - 1))
        print(f"pool: {pool} tokens; saturation: {rate:.3f} jobs a second", flush=True)
        found: dict[str, Any] = {"machine": about_this_run("cpu"), "pool": pool, "saturation": rate, "flags": args.flag}
        found["runs"] = []
        warm_up = plan(args.workload, sizes, jps=WARM_UP_LOAD * rate, duration=args.warm_up, seed=args.seed + OTHER)
        for server in servers:
            server.run(args, warm_up, args.seed + OTHER)
        for number in range(args.seeds):
            seed = args.seed + number
            for load in args.loads:
                jobs = plan(args.workload, sizes, jps=load * rate, duration=args.duration, seed=seed)
                for server in servers if number % 2 == 0 else servers[::-1]:
                    run = {"load": load} | server.run(args, jobs, seed)
                    found["runs"].append(run)
                    (args.out / "unchanged_clients.json").write_text(json.dumps(found, indent=1) + "\n")
                    show_run(run)
    return found


def show_run(run: dict[str, Any]) -> None:
    again = run["recomputed_tokens"] / max(1, run["reusable_tokens"])
    print(
        f"load {run['load']:.0%}  seed {run['seed']}  {run['arm']:<6}{run['jobs_done']:>4} of {run['jobs']:<4}"
        f"service mean {run['avg_service_s']:7.2f} s  p95 {run['p95_service_s']:7.2f} s  "
        f"p99 of the first token {run['p99_ttft_s']:6.2f} s  computed again {again:4.0%}  "
        f"followed {run['followed']:4.0%}",
        flush=True,
    )
    if run["followed"] < FOLLOWED_AT_LEAST:
        print(
            f"warning: only {run['followed']:.0%} of the answers call what they were asked to call (or nothing, where "
            f"nothing was asked for); below {FOLLOWED_AT_LEAST:.0%} the server sees little of the tools",
            flush=True,
        )


def compare(runs: Sequence[dict[str, Any]], load: float, arms: tuple[str, str], key: str) -> tuple[float, float, int]:
    """(mean ratio of the first arm's figure to the second's less 1, half of its 95 % interval, seeds)."""
    one, other = ({run["seed"]: run[key] for run in runs if run["load"] == load and run["arm"] == arm} for arm in arms)
    ratios = [one[seed] / other[seed] - 1 for seed in sorted(one.keys() & other.keys())]
    return fmean(ratios), half_width(ratios), len(ratios)


def show(found: dict[str, Any]) -> None:
    runs = found["runs"]
    print(f"\n{'load':>6}  {'compared':<18}{'mean service':>20}{'p95 service':>20}{'seeds':>7}")
    for load in sorted({run["load"] for run in runs}):
        for arms in COMPARED:
            cells = [compare(runs, load, arms, key) for key in ("avg_service_s", "p95_service_s")]
            shown = "".join(f"{f'{mean:+.1%} ± {half:.1%}':>20}" for mean, half, _ in cells)
            print(f"{load:>6.0%}  {' against '.join(arms):<18}{shown}{cells[0][2]:>7}")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="mixed")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.7, 1.0, 1.3], help="shares of saturation")
    parser.add_argument("--saturation", type=float, help="jobs a second; default: measured first")
    parser.add_argument("--conversations", type=float, default=6, help="that the pool has room for")
    parser.add_argument("--duration", type=float, default=120.0, help="seconds during which jobs arrive")
    parser.add_argument(
        "--warm-up", type=float, default=60.0, help="seconds of other jobs before those that count; 0: none"
    )
    parser.add_argument("--turns", type=int, help=f"of a job; by workload: {DEFAULT_TURNS}")
    parser.add_argument("--time-scale", type=float, default=1.0, help="of tool times")
    parser.add_argument(
        "--longest-tool", type=float, default=60.0, help="seconds; without it a run lasts as long as its longest tool"
    )
    parser.add_argument("--token-scale", type=float, default=0.25, help="of lengths")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--drain", type=float, default=600.0, help="seconds that jobs may take after the last arrival")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without a byte until a request fails")
    parser.add_argument("--flag", action="append", default=[], help="of all servers; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(words)
    scales = ("time_scale", "token_scale")
    for name in (*scales, "duration", "longest_tool", "conversations", "seeds", "saturation", "turns"):
        given = getattr(args, name)
        if given is not None and given <= 0:
            parser.error(f"--{name.replace('_', '-')} is {given}; it must be more than 0")
    if args.warm_up < 0:
        parser.error(f"--warm-up is {args.warm_up:g}; it must be 0 or more")
    if min(args.loads) <= 0:
        parser.error(f"--loads holds {min(args.loads)}; loads must be more than 0")
    return args


def main() -> None:
    args = parse_arguments()
    show(measure(args))
    print(f"the runs are in {args.out / 'unchanged_clients.json'}")


if __name__ == "__main__":
    main()
