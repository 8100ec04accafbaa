"""Checks that pins hold: reads /metrics while the tools of agents' jobs run, one job after the other.

    python -m benchmarks.agents.verify_pin --url http://127.0.0.1:30000 [--jobs 2] [--turns 5] [--workload toy]

The share of the KV cache in use has to rise from turn to turn, must not change while a tool runs, and has to be 0 once
a job's last step has ended; so have the leased tokens. No other client may use the server meanwhile. The metrics are
updated once a second, so each tool runs for ``--gap`` seconds, and /metrics is read from ``--settle`` on, every
``--poll`` seconds. The gap has to be shorter than the policy's pins (continuum: 2 s).

Prints a line for each turn, then the faults, if any; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.agents.job_runner import Server, TurnResult
from benchmarks.agents.usage_sampler import KV_USAGE, LEASED, gauge
from benchmarks.agents.workload import WORKLOADS, Job, Sizes, plan_jobs


@dataclass(frozen=True, slots=True)
class Look:
    """One look at /metrics. usage: 0 to 1. leased: tokens; None where the server does not tell."""

    usage: float
    leased: float | None

    def __str__(self) -> str:
        leased = "" if self.leased is None else f" and {self.leased:g} tokens leased"
        return f"usage {self.usage:.6f}{leased}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn, and what was seen until the next. tools: what the server took its answer for; None if it cannot say."""

    job: int
    turn: int
    is_last: bool
    cost: TurnResult
    tools: list[str] | None
    looks: tuple[Look, ...]


def problems(start: Look, steps: Sequence[Step]) -> list[str]:
    """The faults found in the steps of one job; empty if pins held. start: the state before the first step."""
    found = []
    if start.usage or start.leased:
        found.append(f"before job {steps[0].job}: {start}; other requests hold KV, so the pin cannot be verified")
    before = start
    for step in steps:
        where = f"job {step.job}, turn {step.turn}"
        first, *others = step.looks
        if step.is_last:
            if first.usage or first.leased:
                found.append(f"{where}: {first} after the last step, where nothing should be left")
            continue
        if first.usage <= before.usage:
            found.append(f"{where}: {first} after the turn, {before} before it: usage did not rise")
        if first.leased is not None and first.leased <= (before.leased or 0.0):
            found.append(f"{where}: {first} after the turn, {before} before it: no more tokens are leased")
        found += [
            f"{where}: {look} at look {number} of the gap, {first} at the first"
            for number, look in enumerate(others, 2)
            if look != first
        ]
        before = first
    return found


class Watch:
    """Looks at a server while it serves a job."""

    def __init__(self, server: Server, http: httpx.AsyncClient, args: argparse.Namespace) -> None:
        self._server, self._http = server, http
        self._settle, self._gap, self._poll = args.settle, args.gap, args.poll

    async def look(self) -> Look:
        page = await self._http.get("/metrics")
        usage = gauge(page.text, KV_USAGE)
        if usage is None:
            raise SystemExit(f"{page.url} answered {page.status_code}, without one of {', '.join(KV_USAGE)}")
        return Look(usage, gauge(page.text, LEASED))

    async def run(self, job: Job, job_id: str) -> tuple[Look, list[Step]]:
        """(the state before the job, its steps)."""
        await asyncio.sleep(self._settle)
        start, steps, known = await self.look(), [], job.example_tokens
        messages = self._server.beginning_of(job)
        for number, turn in enumerate(job.turns, 1):
            is_last = number == len(job.turns)
            messages += self._server.messages_of(turn, known, f"{job.number} {number}")
            text, cost = await self._server.answer(messages, turn.max_tokens, job_id, is_last)
            ended = time.perf_counter()
            messages.append({"role": "assistant", "content": text})
            known = cost.prompt_tokens + cost.output_tokens
            tools = await self._tools(job_id)
            looks = await self._looks(ended, is_last)
            steps.append(Step(job=job.number + 1, turn=number, is_last=is_last, cost=cost, tools=tools, looks=looks))
            show(steps[-1])
        return start, steps

    async def _looks(self, ended: float, is_last: bool) -> tuple[Look, ...]:
        """At least one; in a gap as many as it has room for."""
        at, looks = ended + self._settle, []
        while not looks or (not is_last and at < ended + self._gap):
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            looks.append(await self.look())
            at += self._poll
        return tuple(looks)

    async def _tools(self, job_id: str) -> list[str] | None:
        answer = await self._http.get(f"/jobs/{job_id}")
        return answer.json().get("last_calls") if answer.is_success else None


def show(step: Step) -> None:
    usages = " ".join(f"{look.usage:.6f}" for look in step.looks)
    leased = "-" if step.looks[0].leased is None else f"{step.looks[0].leased:g}"
    cached = "-" if step.cost.cached_tokens is None else str(step.cost.cached_tokens)
    print(
        f"{step.job:>4}{step.turn:>5}{'*' if step.is_last else ' '}{step.cost.prompt_tokens:>8}{cached:>8}"
        f"{step.cost.output_tokens:>8}{1e3 * step.cost.latency:>9.0f}  {', '.join(step.tools or ['-']):<14}"
        f"{leased:>8}  {usages}",
        flush=True,
    )


async def verify(args: argparse.Namespace) -> list[str]:
    """Run the jobs, one after the other, and return the faults found."""
    headers = {"Authorization": f"Bearer {args.api_key}"}
    sizes = Sizes(turns=args.turns, time=1.0, tokens=args.scale)
    found: list[str] = []
    print(f"{'job':>4}{'turn':>5} {'prompt':>8}{'cached':>8}{'output':>8}{'ms':>9}  {'tools':<14}{'leased':>8}  usage")
    async with (
        Server(args.url, args.api_key, plain=False, timeout_s=600) as server,
        httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as http,
    ):
        run = f"verify-pin-{time.time_ns():x}"
        for job in plan_jobs(args.workload, sizes, args.jobs, args.seed):
            start, steps = await Watch(server, http, args).run(job, f"{run}-{job.number}")
            found += problems(start, steps)
        return [*found, *hints(await server.settings())] if found else []


def hints(settings: dict[str, Any]) -> list[str]:
    """Reasons why a server with these settings may be right not to pin."""
    policy = settings.get("schedule_policy")
    if policy in ("fcfs", "lpm"):
        return [f"the server's policy is {policy}, which pins nothing: start it with --schedule-policy auto"]
    if policy in ("auto", "handoff") and (settings.get("host_cache_gb") or settings.get("host_cache_ratio")):
        return [f"the server has a host cache, and {policy} does not pin what has a copy there"]
    return []


def parse_arguments(words: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="mini")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--scale", type=float, default=0.25, help="of the lengths")
    parser.add_argument("--gap", type=float, default=1.8, help="seconds that a tool takes")
    parser.add_argument("--settle", type=float, default=1.1, help="seconds until /metrics is sure to be up to date")
    parser.add_argument("--poll", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    for name, least in (("jobs", 1), ("turns", 2)):  # pins are there between two turns
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}; use {least} or more")
    if args.gap <= args.settle + args.poll:
        parser.error(f"--gap is {args.gap}; it must be more than --settle and --poll together, for two looks")
    return args


def main() -> None:
    found = asyncio.run(verify(parse_arguments()))
    for problem in found:
        print(problem)
    print("FAILED" if found else "pins held, and nothing was left")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
