"""Measures the durations of agents' jobs on a live server, by policy and load.

    python -m benchmarks.agents.agent_jobs --url http://127.0.0.1:30000 --policy fcfs --jps 2 --duration 60
    python -m benchmarks.agents.agent_jobs --url http://127.0.0.1:8000 --policy other --plain --jps 2
    python -m benchmarks.agents.agent_jobs --model FOLDER --jps 0.5 1 2 --rounds 2 \\
        --serve "--schedule-policy fcfs" --serve "--schedule-policy continuum" --common "--max-total-tokens 16384"

Jobs arrive as a Poisson process, ``--jps`` of them a second for ``--duration`` seconds; each takes its turns one after
the other, with a tool between two of them, and the conversation grows (workloads: see workload.py). ``job_id`` and
``is_last_step`` are sent in ``extra_body``, as OpenAI's client sends them; ``--plain`` leaves them out, for servers
that do not have them. With ``--serve`` Baton's server is started for every run, and the policies take turns, in reverse
order every other round; the first word of the flag's text may be a name for the run, else the policy names it.

``--scale`` shortens tool times and lengths, for small machines and models. Every run writes its own JSON file (keys:
see run_report.py); plot_jps_sweep.py plots them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.agents.job_runner import Server, run_jobs
from benchmarks.agents.run_report import SCHEMA, show, summarize
from benchmarks.agents.usage_sampler import UsageSampler
from benchmarks.agents.workload import DEFAULT_TURNS, WORKLOADS, Sizes, plan
from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.servers import Server as OwnServer


class Policy(NamedTuple):
    """flags: of the server to start."""

    name: str
    flags: tuple[str, ...] = ()


def read_policy(text: str) -> Policy:
    """A name, if one stands there, and flags. Raises ValueError."""
    words = shlex.split(text)
    if words and not words[0].startswith("-"):
        return Policy(words[0], tuple(words[1:]))
    for flag, value in itertools.pairwise(words):
        if flag == "--schedule-policy":
            return Policy(value, tuple(words))
    raise ValueError(f"--serve {text!r} has no name: put one before the flags, or name a --schedule-policy")


def order(policies: list[Policy], loads: list[float], rounds: int) -> Iterator[tuple[int, float, Policy]]:
    """(round, JPS, policy): in order, in reverse order every other round."""
    for number in range(rounds):
        for jps in loads:
            for policy in policies if number % 2 == 0 else reversed(policies):
                yield number, jps, policy


async def run_once(args: argparse.Namespace, url: str, jps: float) -> dict[str, Any]:
    """Run the jobs on the server at this address, and report their times."""
    turns = args.turns or DEFAULT_TURNS[args.workload]
    sizes = Sizes(turns=turns, time=args.time_scale or args.scale, tokens=args.token_scale or args.scale)
    jobs = plan(args.workload, sizes, jps=jps, duration=args.duration, seed=args.seed)
    async with Server(url, args.api_key, plain=args.plain, timeout_s=args.timeout) as server:
        started = time.perf_counter()
        with tqdm(total=len(jobs), desc=f"{jps:g} JPS", unit="job", leave=False, disable=None) as bar:
            async with UsageSampler(server.url, args.api_key) as usage:
                results = await run_jobs(server, jobs, args.seed, args.drain, bar.update)
        took = time.perf_counter() - started
        work = {"workload": args.workload, "turns": turns, "time_scale": sizes.time, "token_scale": sizes.tokens}
        work |= {"jps": jps, "duration_s": args.duration, "seed": args.seed, "plain": args.plain, "model": server.model}
        name = args.policy or (await server.settings()).get("schedule_policy", "server")
        return {"policy": name} | work | {"took_s": took, "kv_usage": usage.report()} | summarize(results)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs, each of them written down as soon as it is done."""
    policies = [read_policy(text) for text in args.serve] or [Policy(args.policy)]
    about, runs = about_this_run("cpu"), []
    args.out.mkdir(parents=True, exist_ok=True)
    for number, jps, policy in order(policies, args.jps, args.rounds):
        with contextlib.ExitStack() as stack:
            flags = (*shlex.split(args.common), *policy.flags) if args.serve else ()
            url = args.url
            if args.serve:
                own = OwnServer(args.model, flags)
                stack.callback(own.close)
                url = own.url
            found = asyncio.run(run_once(args, url, jps))
        name = policy.name or found["policy"]
        run = {"schema": SCHEMA, "round": number, "flags": flags} | found | {"policy": name}
        run |= {"load_average": os.getloadavg(), "machine": about}
        runs.append(run)
        (args.out / f"agents_{name}_{args.workload}_{jps:g}jps_{number}.json").write_text(
            json.dumps(run, indent=1) + "\n"
        )
    return runs


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a server that runs")
    where.add_argument("--serve", action="append", default=[], metavar="FLAGS", help="start a server with these flags")
    parser.add_argument("--model", type=Path, help="folder of the model, for --serve")
    parser.add_argument("--common", default="", metavar="FLAGS", help="further flags of all servers of --serve")
    parser.add_argument("--policy", default="", help="what the run is called, with --url; default: the server's own")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--plain", action="store_true", help="send neither job_id nor is_last_step")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="mini")
    parser.add_argument(
        "--jps", type=float, nargs="+", default=[1.0], help="jobs that arrive a second; several: a sweep"
    )
    parser.add_argument("--duration", type=float, default=60.0, help="seconds during which jobs arrive")
    parser.add_argument("--turns", type=int, help=f"of a job; by workload: {DEFAULT_TURNS}")
    parser.add_argument("--scale", type=float, default=1.0, help="of tool times and lengths")
    parser.add_argument("--time-scale", type=float, help="of tool times alone")
    parser.add_argument("--token-scale", type=float, help="of lengths alone")
    parser.add_argument("--rounds", type=int, default=1, help="the order of the policies is swapped every round")
    parser.add_argument("--drain", type=float, default=600.0, help="seconds that jobs may take after the last arrival")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without a byte until a request fails")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args(words)
    if args.serve and args.model is None:
        parser.error("--serve needs --model, the folder of the model")
    for name in ("jps", "duration", "scale", "time_scale", "token_scale", "turns", "rounds"):
        given = getattr(args, name)
        if given is not None and min(given if isinstance(given, list) else [given]) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {given}; it must be more than 0")
    try:
        [read_policy(text) for text in args.serve]
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse_arguments()
    show(measure(args))
    print(f"one JSON file a run in {args.out}")


if __name__ == "__main__":
    main()
