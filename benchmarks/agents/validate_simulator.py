"""Compares the simulator with live runs on this machine: the same jobs, policy by policy.

    python -m benchmarks.agents.validate_simulator --model FOLDER --jps 0.6 --duration 150 \\
        --policies fcfs continuum handoff --pool-tokens 4096 --token-scale 0.3 --time-scale 0.5

The costs of a step are measured first (step_costs.py), one kind of step at a time. With agents, their client and all
kinds of steps at once, every step costs more, by a fifth on two cores: ``--calibrate`` multiplies the costs by the
factor that makes the first run come out right. That run is then no test any more; the others are.

Then a server runs the jobs of agent_jobs.py under each policy, with `--scheduler-trace`, and the simulator runs the
*first* policy's trace (arrivals, lengths, tool times) under each of them, so its results for the other policies are
predictions. Where the machine is as fast as when it was measured, both should agree; the table shows the differences.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from baton.entrypoints.simulate.runs import Plan, run
from benchmarks.agents import step_costs
from benchmarks.agents.agent_jobs import parse_arguments, run_once
from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.servers import Server

FACTORS = (0.5, 4.0)
CALIBRATIONS = 9
"""Halvings of that range: to within a hundredth."""


def live(args: argparse.Namespace, policy: str, number: int, trace: Path) -> dict[str, Any]:
    """One run of a server with this policy."""
    trace.unlink(missing_ok=True)
    flags = [*server_flags(args), "--schedule-policy", policy, "--scheduler-trace", str(trace)]
    words = ["--url", "none", "--workload", args.workload, "--duration", str(args.duration), "--seed", str(number)]
    words += ["--token-scale", str(args.token_scale), "--time-scale", str(args.time_scale)]
    own = Server(args.model, flags)
    try:
        return asyncio.run(run_once(parse_arguments(words), own.url, args.jps))
    finally:
        own.close()


def server_flags(args: argparse.Namespace) -> list[str]:
    flags = ["--max-total-tokens", str(args.pool_tokens), "--max-running-requests", str(args.rows)]
    return [*flags, "--max-leased-requests", str(args.rows), *shlex.split(args.flags)]


def simulated(args: argparse.Namespace, policy: str, trace: Path, costs: Path) -> dict[str, Any]:
    settings = {"max_running_requests": args.rows, "max_leased_requests": args.rows}
    plan = Plan(
        arm=policy,
        trace=str(trace),
        costs=str(costs),
        files=trace.stem,
        pool=args.pool_tokens,
        num_jobs=0,
        trim=0.0,
        burst=1,
        settings=settings,
    )
    return run(plan)["figures"]


def _service(args: argparse.Namespace, policy: str, trace: Path, costs: Path) -> float:
    return simulated(args, policy, trace, costs)["service_s"]["mean"]


def calibrate(costs: Path, target: float, service_of: Callable[[Path], float], scaled: Path) -> float:
    """Write costs that are all larger by one factor, so that ``service_of`` them is the target; returns the factor."""
    found: dict[str, float] = json.loads(costs.read_text())

    def service(factor: float) -> float:
        scaled.write_text(json.dumps({name: cost * factor for name, cost in found.items()}))
        return service_of(scaled)

    low, high = FACTORS
    for _ in range(CALIBRATIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if service(middle) < target else (low, middle)
    service(low)
    return low


def row(policy: str, number: int, lived: dict[str, Any], played: dict[str, Any]) -> dict[str, Any]:
    """Seconds, live and simulated."""
    found: dict[str, Any] = {"policy": policy, "round": number, "jobs": lived["jobs"], "failed": lived["jobs_failed"]}
    for name, key in (("duration", "duration_s"), ("service", "service_s")):
        found[f"{name} live"], found[f"{name} simulated"] = lived[f"avg_{name}_s"], played[key]["mean"]
        found[f"p95 {name} live"], found[f"p95 {name} simulated"] = lived[f"p95_{name}_s"], played[key]["p95"]
    found["hits live"] = lived["cached_tokens"] / lived["prompt_tokens"]
    found["hits simulated"] = played["hit_rate"]
    return found


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'':28}{'mean duration, s':^24}{'mean service, s':^24}{'P95 duration, s':^24}{'hits, %':^14}")
    print(
        f"{'policy':<16}{'round':>6}{'jobs':>6}"
        + f"{'live':>8}{'sim.':>7}{'differ':>9}" * 3
        + f"{'live':>8}{'sim.':>6}"
    )
    for found in rows:
        print(f"{found['policy']:<16}{found['round']:>6}{found['jobs']:>6}", end="")
        for name in ("duration", "service", "p95 duration"):
            lived, played = found[f"{name} live"], found[f"{name} simulated"]
            print(f"{lived:>8.2f}{played:>7.2f}{100 * (played / lived - 1):>+8.1f}%", end="")
        print(f"{100 * found['hits live']:>8.0f}{100 * found['hits simulated']:>6.0f}")
    off = [abs(found["duration simulated"] / found["duration live"] - 1) for found in rows]
    print(f"mean durations differ by {100 * np.mean(off):.1f} % on average, {100 * max(off):.1f} % at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--policies", nargs="+", default=["fcfs", "continuum", "handoff"])
    parser.add_argument("--workload", default="mini")
    parser.add_argument("--jps", type=float, default=0.6, help="jobs that arrive a second")
    parser.add_argument("--duration", type=float, default=150.0, help="seconds during which they arrive")
    parser.add_argument("--token-scale", type=float, default=0.3)
    parser.add_argument("--time-scale", type=float, default=0.5)
    parser.add_argument("--pool-tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=16, help="requests that run at a time")
    parser.add_argument("--flags", default="", help="further flags of the server")
    parser.add_argument("--rounds", type=int, default=1, help="other jobs each time, policies in reverse every other")
    parser.add_argument("--costs", type=Path, help="as step_costs.py wrote them; else they are measured first")
    parser.add_argument("--out", type=Path, default=RESULTS / "validate_simulator")
    parser.add_argument("--calibrate", action="store_true", help="scale the costs by the first run")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    costs = args.costs or args.out / "costs.json"
    if args.costs is None:
        line, steps = step_costs.measure(args.model, shlex.split(args.flags), seed=0)
        step_costs.show(line, steps)
        costs.write_text(json.dumps(line, indent=1) + "\n")
    rows: list[dict[str, Any]] = []
    for number in range(args.rounds):
        order = args.policies if number % 2 == 0 else args.policies[::-1]
        traces = {name: args.out / f"{name}_{number}.jsonl" for name in order}
        lived = {name: live(args, name, number, traces[name]) for name in order}
        first = args.policies[0]
        seen = traces[first]
        if args.calibrate and number == 0:
            scaled, target = args.out / "costs_scaled.json", lived[first]["avg_service_s"]
            factor = calibrate(costs, target, partial(_service, args, first, seen), scaled)
            print(f"costs times {factor:.2f}, so that {first} in round 0 comes out right")
            costs = scaled
        rows += [row(name, number, lived[name], simulated(args, name, seen, costs)) for name in args.policies]
        show(rows)
    (args.out / "report.json").write_text(json.dumps({"rows": rows, "machine": about_this_run("cpu")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
