"""The command line of the simulator, and the grid of runs that it asks for."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from ...runtime.pool_sizes import PoolSizes
from ...scheduler.config import SchedulerConfig
from ...scheduler.policies.registry import PINNING
from ..contradictions import check_scheduler
from ..flag_types import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, WHOLE
from ..server_config import UsageError
from .arms import all_arms, arm_named
from .cost_model import CARDS, MODELS, CostError, ModelSizes
from .runs import Plan
from .study import jobs_in, peak_plan
from .work.tool_shapes import SHAPES
from .work.traces import TraceError, read_pools
from .work.workloads import WORKLOADS

DEFAULT_GPU, DEFAULT_MODEL = "H200", "llama-3.1-8b"

OWN_SETTINGS = ("schedule_policy", "max_total_tokens", "context_length", "max_states", "swa_full_tokens_ratio")
"""Scheduler settings that flags of the simulator or the jobs decide, so that --set may not."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="baton simulate",
        description="Play agents' jobs on Baton's scheduler without a model, and compare policies. Flags with several "
        "values form a grid; every combination is run.",
    )
    work = parser.add_argument_group("work")
    work.add_argument("trace", nargs="?", default="", help="file of jobs (JSON lines) to play instead of --workload")
    work.add_argument("--workload", choices=WORKLOADS, default="agents", help="shape of the generated jobs")
    work.add_argument("--tools", nargs="+", choices=SHAPES, default=["shell"], help="distribution of tool times")
    work.add_argument("--scale", nargs="+", type=POSITIVE, default=[1.0], help="factor on the lengths of prompts")
    work.add_argument("--one-shots", type=SHARE, default=0.0, help="share of jobs that end with their first turn")
    load = work.add_mutually_exclusive_group()
    load.add_argument(
        "--load", nargs="+", type=POSITIVE, help="load in %% of the peak of fcfs, which is measured first"
    )
    load.add_argument(
        "--rate", nargs="+", type=POSITIVE, help="jobs per second; for a trace, the speed-up over its recording"
    )
    work.add_argument("--minutes", type=POSITIVE, default=10.0, help="minutes of arrivals in a run")
    work.add_argument(
        "--num-jobs",
        type=WHOLE,
        default=0,
        help="number of jobs, instead of --minutes; for a trace, play only the first so many",
    )
    work.add_argument("--seeds", type=COUNT, default=3, help="runs per combination, each with different generated jobs")

    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--gpu",
        nargs="+",
        choices=CARDS,
        help="cards to simulate; default: H200, with the pools of the trace if it has them",
    )
    machine.add_argument(
        "--model",
        nargs="+",
        metavar="MODEL",
        help=f"models: {', '.join(MODELS)}, or a Hugging Face folder or its config.json, which needs no weights; "
        "default: llama-3.1-8b, with the pools of the trace if it has them",
    )
    machine.add_argument("--costs", default="", help="JSON file of measured step costs, instead of --gpu and --model")
    machine.add_argument(
        "--pool-tokens",
        nargs="+",
        type=WHOLE,
        default=[0],
        help="tokens in the KV pool; 0: as many as fit on the card",
    )
    machine.add_argument(
        "--max-states",
        nargs="+",
        type=WHOLE,
        default=[0],
        help="recurrent states that a hybrid keeps on the card; 0: as many as a server would, or as the trace says",
    )
    machine.add_argument(
        "--find-states",
        action="store_true",
        help="find how many states are enough for the first of --policies, by about ten runs for each cell",
    )
    machine.add_argument(
        "--window",
        type=WHOLE,
        default=0,
        help="tokens that layers with a sliding window see; 0: those of the model or the trace",
    )
    machine.add_argument(
        "--swa-full-tokens-ratio",
        nargs="+",
        type=SHARE,
        default=[0.0],
        help="tokens of the pool for layers with a sliding window, as a share of those of the KV pool; 0: as many as "
        "are needed, up to a fifth",
    )
    machine.add_argument(
        "--host-gb",
        nargs="+",
        type=NOT_NEGATIVE,
        default=[0.0],
        help="sizes of the host tier in GB; 0: that of the trace, if it has one",
    )

    compared = parser.add_argument_group("comparison")
    compared.add_argument(
        "--policies",
        nargs="+",
        default=["all"],
        metavar="POLICY[@TIME][+pin][+chat][+plain][+bare][+host]",
        help="policies to compare; the first is the baseline, all stands for every policy. @TIME: time of the pins, in "
        "seconds or a rule of --pin-time; +pin: turns ask for a lease of --pin-ttl; +chat: turns are chats that name "
        "their job; +plain: turns are chats that do not; +bare: turns are prompts for /generate that name nothing; "
        "+host: with a host tier",
    )
    compared.add_argument(
        "--pin-ttl", type=POSITIVE, default=2.0, help="seconds of the lease that +pin asks for (retain_ttl)"
    )
    compared.add_argument(
        "--conversation-ttl", type=NOT_NEGATIVE, default=60.0, help="seconds for which turns of chats are leased"
    )
    compared.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings of the scheduler, such as chunked_prefill_size=4096",
    )

    how = parser.add_argument_group("execution")
    how.add_argument(
        "--burst",
        type=COUNT,
        default=16,
        help="most tokens of a row in one step; 1 plays every step, as a server does",
    )
    how.add_argument(
        "--check",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="N",
        help="check the invariants every N steps (1 without a value)",
    )
    how.add_argument("--trim", type=float, default=0.2, help="share of jobs at each end of a run that does not count")
    how.add_argument("--jobs", type=COUNT, default=1, help="number of processes")
    how.add_argument(
        "--limit", type=WHOLE, default=0, help="most new runs in this call; call again for the rest; 0: no limit"
    )
    how.add_argument(
        "--out", type=Path, help="folder for runs.jsonl, report.json and report.png; runs that it has are not repeated"
    )
    args = parser.parse_args(argv)
    try:
        args.models = {name: _model_sizes(name) for name in args.model or (DEFAULT_MODEL,)}
        is_trace = args.trace and Path(args.trace).is_file()
        args.recorded = read_pools(Path(args.trace)) if is_trace and not (args.gpu or args.model) else None
    except (CostError, TraceError) as error:
        parser.error(str(error))
    _check(parser, args)
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out {args.out}: {error.strerror}; choose a folder that can be written")
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.trace and args.load:
        parser.error("--load is for generated workloads; for a trace, use --rate, the speed-up over its recording")
    for name in ("workload", "tools", "minutes", "seeds", "one_shots"):
        if args.trace and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is for generated workloads; a trace has its own")
    if not 0 <= args.trim < 0.5:
        parser.error(f"--trim is {args.trim}; it should be from 0 to below 0.5")
    if args.check < 0:
        parser.error(f"--check is {args.check}; it should be a number of steps")
    has_host = max(args.host_gb) > 0 or (args.recorded is not None and args.recorded.host_tokens > 0)
    if args.policies == ["all"]:
        args.policies = all_arms(has_host)
    for name in args.policies:
        try:
            arm = arm_named(name)
        except ValueError as error:
            parser.error(str(error))
        if arm.host and not has_host:
            parser.error(f"{name} needs a host tier; give its size with --host-gb")
    if max(args.host_gb) > 0 and not any(arm_named(name).host for name in args.policies):
        parser.error("--host-gb sizes a host tier, but none of --policies has one; add +host to one of them")
    try:
        _check_pools(args)
    except UsageError as error:
        parser.error(str(error))
    try:
        args.settings = dict(map(_setting, args.set))
    except ValueError as error:
        parser.error(str(error))
    try:
        check_scheduler(SchedulerConfig(**{"schedule_policy": PINNING[0], **args.settings}))
    except UsageError as error:
        parser.error(f"--set: {error}")


def _check_pools(args: argparse.Namespace) -> None:
    """Raises UsageError for sizes of states and windows that contradict each other, the model or the trace."""
    recorded: PoolSizes | None = args.recorded
    models: list[ModelSizes] = [args.models[name] for name in args.model or ()]
    has_states = any(args.max_states) or (recorded is not None and recorded.states > 0)
    for model in models:
        if any(args.max_states) and not model.bytes_per_state:
            raise UsageError(f"--max-states: {model.name} keeps no recurrent states; leave it out, or name a hybrid")
        if args.window and model.has_latents:
            raise UsageError(f"--window: {model.name} keeps latents, all in one pool; leave it out")
        has_states |= model.bytes_per_state > 0
    if args.find_states and not has_states:
        raise UsageError("--find-states is for models with recurrent states; name one, or give --max-states")
    if args.window and has_states:
        raise UsageError("--window: with recurrent states all layers share one pool; leave out one of the two")
    sized = [*models, *([recorded] if recorded is not None else [])]
    knows_windows = bool(sized) and all(each.bytes_per_window_token > 0 for each in sized)
    if args.window and not knows_windows and recorded is None and not all(args.pool_tokens):
        raise UsageError(
            "--window: how much memory it saves depends on how many layers have it; give --pool-tokens, or --model "
            "with the folder of such a model"
        )
    if any(args.swa_full_tokens_ratio) and not (args.window or knows_windows):
        raise UsageError("--swa-full-tokens-ratio is for layers with a sliding window; give --window, or leave it out")
    on_host = [name for name in args.policies if arm_named(name).host]
    if args.window and on_host and not knows_windows:
        raise UsageError(
            f"--window: with a host tier ({', '.join(on_host)}) all layers share one pool, of a size that depends on "
            "the model; leave it out, or give --model with the folder of such a model"
        )
    if any(args.swa_full_tokens_ratio) and len(on_host) == len(args.policies):
        raise UsageError("--swa-full-tokens-ratio: with a host tier all layers share one pool; leave it out")


def _model_sizes(name: str) -> ModelSizes:
    """Of a name in MODELS, or of a folder. Raises CostError."""
    if name in MODELS:
        return MODELS[name]
    if not Path(name).exists():
        raise CostError(f"--model {name} is no folder, and none of {', '.join(MODELS)}")
    from .model_folder import read_model_sizes  # imports torch

    return read_model_sizes(Path(name))


def _setting(text: str) -> tuple[str, Any]:
    name, given, value = text.partition("=")
    known = {field.name: field for field in fields(SchedulerConfig) if field.name not in OWN_SETTINGS}
    if not given or name not in known:
        raise ValueError(f"--set {text}: not NAME=VALUE with a name among {', '.join(known)}")
    try:
        found = json.loads(value)
    except ValueError:
        found = value
    try:
        found = msgspec.convert(found, get_type_hints(SchedulerConfig)[name])
    except msgspec.ValidationError:
        raise ValueError(f"--set {text}: the value should be of type {known[name].type}") from None
    choices = known[name].metadata.get("choices")
    if choices and found not in choices:
        raise ValueError(f"--set {text}: the value should be one of {', '.join(choices)}")
    return name, found


def cells(args: argparse.Namespace) -> list[Plan]:
    """A plan for each combination of cards, models, tools, scales and sizes of pools."""
    first = Plan(
        arm="",
        trace=args.trace,
        workload=args.workload,
        costs=args.costs,
        files=_digest(args.trace, args.costs),
        settings=args.settings,
        one_shots=args.one_shots,
        burst=args.burst,
        check_every=args.check,
        trim=args.trim,
        conversation_ttl_s=args.conversation_ttl,
        window=args.window,
        recorded=args.recorded,
    )
    grid: dict[str, Sequence[Any]] = {
        "gpu": args.gpu or [DEFAULT_GPU],
        "model": [*args.models],
        "tools": args.tools,
        "scale": args.scale,
        "pool": args.pool_tokens,
        "states": args.max_states,
        "window_ratio": args.swa_full_tokens_ratio,
    }
    found = [msgspec.structs.replace(first, **dict(zip(grid, each))) for each in itertools.product(*grid.values())]
    return [
        plan if plan.model in MODELS else msgspec.structs.replace(plan, sizes=args.models[plan.model]) for plan in found
    ]


def plans(args: argparse.Namespace, peaks: dict[str, float]) -> list[Plan]:
    """The plans of all runs. peaks: from `study.find_peaks`, by the key of a cell's `peak_plan`; needed for --load."""
    found = []
    for cell in cells(args):
        rates = args.rate or [1.0]
        if args.load:
            peak = peaks[peak_plan(cell, args.minutes).key]
            rates = [peak * load / 100 for load in args.load]
        for rate, arm in itertools.product(rates, _arms(args)):
            count = args.num_jobs or (0 if args.trace else jobs_in(args.minutes, rate))
            run = msgspec.structs.replace(cell, rate=rate, num_jobs=count, **arm)
            seeds = 1 if args.trace else args.seeds  # a trace has the same jobs for every seed
            found += [msgspec.structs.replace(run, seed=seed) for seed in range(seeds)]
    return found


def _digest(*paths: str) -> str:
    """A digest of these files' contents. Files that cannot be read are left to their readers to report."""
    digest = hashlib.sha256()
    for path in paths:
        if path and Path(path).is_file():
            digest.update(Path(path).read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()[:16] if any(paths) else ""


def _arms(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The fields in which the plans of a cell differ: one dict per policy, or per size of the host tier if it has
    one."""
    arms = []
    for name in args.policies:
        arm = arm_named(name)
        pin_s = args.pin_ttl if arm.pins else 0.0
        sizes = [size for size in args.host_gb if size] if arm.host else []
        arms += [{"arm": name, "host_gb": size, "pin_s": pin_s} for size in sorted(sizes) or [0.0]]
    return arms
