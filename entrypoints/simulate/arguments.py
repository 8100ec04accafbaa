"""The command line of the simulator, and the runs that it asks for."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from ...scheduler.config import SchedulerConfig
from .arms.arm import all_arms, arm_named
from .cost_model import CARDS, MODELS
from .runs import Plan
from .study import jobs_in, peak_plan
from .work.tools import SHAPES
from .work.workloads import WORKLOADS

OWN_SETTINGS = ("schedule_policy", "max_total_tokens", "context_length")
"""Of the scheduler, what flags of the simulator or the jobs decide."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m baton.entrypoints.simulate",
        description="Play agents' jobs on Baton's scheduler without a model, and compare policies. Flags that take "
        "several values make a grid; every combination is run.",
    )
    work = parser.add_argument_group("work")
    work.add_argument("trace", nargs="?", default="", help="jobs from a file, instead of --workload")
    work.add_argument("--workload", choices=WORKLOADS, default="agents")
    work.add_argument("--tools", nargs="+", choices=SHAPES, default=["shell"], help="how long tools run")
    work.add_argument("--scale", nargs="+", type=_positive, default=[1.0], help="multiplies the lengths of prompts")
    work.add_argument("--one-shots", type=_share, default=0.0, help="share of the jobs that end with their first turn")
    load = work.add_mutually_exclusive_group()
    load.add_argument("--load", nargs="+", type=_positive, help="in %% of the peak of fcfs, which is looked for first")
    load.add_argument("--rate", nargs="+", type=_positive, help="jobs/s; of a trace: times as fast as it was recorded")
    work.add_argument("--minutes", type=_positive, default=10.0, help="of arrivals in a run")
    work.add_argument("--num-jobs", type=_whole, default=0, help="in place of --minutes; of a trace: the first so many")
    work.add_argument("--seeds", type=_whole, default=3, help="runs of each kind, each with other made-up jobs")

    machine = parser.add_argument_group("machine")
    machine.add_argument("--gpu", nargs="+", choices=CARDS, default=["H200"])
    machine.add_argument("--model", nargs="+", choices=MODELS, default=["llama-3.1-8b"])
    machine.add_argument("--costs", default="", help="JSON file of measured costs, in place of those of card and model")
    machine.add_argument("--pool-tokens", nargs="+", type=_whole, default=[0], help="KV pool; 0: what the card leaves")
    machine.add_argument("--host-gb", nargs="+", type=_not_negative, default=[0.0], help="sizes of the host tier")

    compared = parser.add_argument_group("what is compared")
    compared.add_argument(
        "--policies",
        nargs="+",
        default=["all"],
        metavar="POLICY[@TIME][+pin][+chat][+plain][+host]",
        help="the first is what the others are compared with; +pin: turns ask for a lease of --pin-ttl; +chat: turns "
        "are chats that name their job; +plain: chats that do not; +host: with the host tier; @TIME: how its pins' "
        "time is chosen, seconds or a rule of --pin-time; all: every policy",
    )
    compared.add_argument("--pin-ttl", type=_positive, default=2.0, help="seconds (retain_ttl)")
    compared.add_argument(
        "--conversation-ttl", type=_not_negative, default=60.0, help="seconds for which chats are leased"
    )
    compared.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the scheduler, as chunked_prefill_size"
    )

    how = parser.add_argument_group("how")
    how.add_argument("--burst", type=_whole, default=16, help="most tokens of a row in one step; 1: as a server")
    how.add_argument("--check", type=int, nargs="?", const=1, default=0, metavar="N", help="invariants each N steps")
    how.add_argument("--trim", type=float, default=0.2, help="share of jobs at each end that is not measured")
    how.add_argument("--jobs", type=_whole, default=1, help="processes")
    how.add_argument("--limit", type=_whole, default=0, help="new runs at most; the rest when it is called again")
    how.add_argument("--out", type=Path, help="folder for runs.jsonl, report.json and report.png; what it has is kept")
    args = parser.parse_args(argv)
    _check(parser, args)
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out {args.out}: {error.strerror}; hours of runs would be lost")
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.trace and args.load:
        parser.error("--load is for made-up workloads; of a trace say --rate, how many times as fast it is played")
    for name in ("workload", "tools", "minutes", "seeds", "one_shots"):
        if args.trace and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is for made-up workloads; a trace has its own")
    if not 0 <= args.trim < 0.5:
        parser.error(f"--trim is {args.trim}; it should be from 0 to below 0.5")
    if args.check < 0:
        parser.error(f"--check is {args.check}; it should be a number of steps")
    has_host = max(args.host_gb) > 0
    if args.policies == ["all"]:
        args.policies = all_arms(has_host)
    for name in args.policies:
        try:
            arm = arm_named(name)
        except ValueError as error:
            parser.error(str(error))
        if arm.host and not has_host:
            parser.error(f"{name} needs a host tier; give its size with --host-gb")
    if has_host and not any(arm_named(name).host for name in args.policies):
        parser.error("--host-gb sizes a host tier, and none of --policies has one; add +host to one of them")
    try:
        args.settings = dict(map(_setting, args.set))
    except ValueError as error:
        parser.error(str(error))


def _setting(text: str) -> tuple[str, Any]:
    name, given, value = text.partition("=")
    known = [field.name for field in fields(SchedulerConfig) if field.name not in OWN_SETTINGS]
    if not given or name not in known:
        raise ValueError(f"--set {text}: not NAME=VALUE with a name among {', '.join(known)}")
    try:
        found = json.loads(value)
    except ValueError:
        found = value
    kind = {field.name: field.type for field in fields(SchedulerConfig)}[name]
    wanted = {"int": int, "float": int | float, "bool": bool}.get(str(kind))
    if wanted is not None and (not isinstance(found, wanted) or (wanted is not bool and isinstance(found, bool))):
        raise ValueError(f"--set {text}: the value should be of type {kind}")
    return name, found


def cells(args: argparse.Namespace) -> list[Plan]:
    """A plan for each combination of the grid, but for loads, policies, host tiers and seeds."""
    work = {"trace": args.trace, "workload": args.workload, "costs": args.costs, "settings": args.settings}
    work["files"] = _digest(args.trace, args.costs)
    work["one_shots"] = args.one_shots
    how = {"burst": args.burst, "check_every": args.check, "trim": args.trim}
    how["conversation_ttl_s"] = args.conversation_ttl
    product = itertools.product(args.gpu, args.model, args.tools, args.scale, args.pool_tokens)
    return [
        Plan(arm="", gpu=gpu, model=model, tools=tools, scale=scale, pool=pool, **work, **how)
        for gpu, model, tools, scale, pool in product
    ]


def plans(args: argparse.Namespace, peaks: dict[str, float]) -> list[Plan]:
    """All runs. peaks: of the cells, as `study.find_peaks` returns them; needed for --load."""
    found = []
    for cell in cells(args):
        rates = args.rate or [1.0]
        if args.load:
            peak = peaks[peak_plan(cell, args.minutes).key]
            rates = [peak * load / 100 for load in args.load]
        for rate, arm in itertools.product(rates, _arms(args)):
            count = args.num_jobs or (0 if args.trace else jobs_in(args.minutes, rate))
            run = msgspec.structs.replace(cell, rate=rate, num_jobs=count, **arm)
            seeds = 1 if args.trace else args.seeds  # a trace has the same jobs each time
            found += [msgspec.structs.replace(run, seed=seed) for seed in range(seeds)]
    return found


def _digest(*paths: str) -> str:
    """Of what is in these files; those that cannot be read are complained of by whoever needs them."""
    digest = hashlib.sha256()
    for path in paths:
        if path and Path(path).is_file():
            digest.update(Path(path).read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()[:16] if any(paths) else ""


def _arms(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What the plans of a cell differ in: each policy once, and once for each size of the host tier if it has one."""
    arms = []
    for name in args.policies:
        arm = arm_named(name)
        pin_s = args.pin_ttl if arm.pins else 0.0
        sizes = [size for size in args.host_gb if size] if arm.host else [0.0]
        arms += [{"arm": name, "host_gb": size, "pin_s": pin_s} for size in sorted(sizes)]
    return arms


def _number(check: Callable[[float], bool], what: str, kind: type = float) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if not check(value) or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    read.__name__ = "number"
    return read


_positive = _number(lambda value: value > 0, "a number above 0")
_not_negative = _number(lambda value: value >= 0, "a number of at least 0")
_share = _number(lambda value: 0 <= value <= 1, "a share, 0 to 1")
_whole = _number(lambda value: value >= 0, "a whole number of at least 0", int)
