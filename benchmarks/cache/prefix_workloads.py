"""Measures hit rate and time to the first token by workload, with and without the radix cache.

    python -m benchmarks.cache.prefix_workloads [--requests 60] [--only NAME] [--seed 0] [--out DIR]

Two engines in this process, on the 40 M-parameter model with random weights: one with default settings, one with
--disable-radix-cache; all other settings are equal, and nothing is chosen by trials. Each request goes to both engines,
one at a time, and the order changes from request to request. So times are paired, and a drift of the machine does not
widen the interval of their difference. The pool is filled once before, so that it is as full as that of a server that
has run for a while. Chats are interleaved: a turn of each, then the next. Hit rates are shares of prompt tokens;
"attainable" is the rate of an infinite cache for the same requests, computed by baton.entrypoints.analyze without an
engine.

Prints a table and writes prefix_workloads.json. The goal: where nothing is shared, the cache has no measurable cost:
the interval of the difference is below 1 % of the time, or contains 0 and extends at most 2 % to each side. Times are
measured at the client; CPU time is that of this process, whose other engine is idle meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from array import array
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from tqdm import tqdm

from baton.entrypoints.analyze.analysis import Analysis
from baton.entrypoints.analyze.log.logged_request import LoggedRequest
from baton.entrypoints.analyze.log.prompt_text import id_units
from benchmarks.cache.workloads import PUBLISHED, PUBLISHED_NOTE, WORKLOADS, Tokens, Workload
from benchmarks.common.clients import Call, EngineClient, Reply
from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.models import LLAMA_40M, LLAMA_TINY, write_dummy_model
from benchmarks.tiers.write_cost import difference

WITH, WITHOUT = "cache", "no cache"
GOAL_SHARE, WIDEST = 0.01, 0.02
"""Share of the time, without shared prefixes: the allowed cost of the cache, and the half-width of an interval that
shows it."""

POOL, LONG = 40_960, 4000
"""Tokens of the KV pool, and of the prompts that fill it at first."""

CHUNK = 1024
"""New tokens of a step: what a trial at the start finds may differ from engine to engine, as may --linear-backend."""

SETTLE_S = 0.002
"""After an answer, for what the scheduler still has to put away."""

MEASURES = {"ttft": "time to the first token", "total": "whole time", "cpu": "CPU time"}


@dataclass
class Cell:
    """One workload on both engines, in order of the requests."""

    seconds: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {measure: {WITH: [], WITHOUT: []} for measure in MEASURES}
    )
    """By measure and engine."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    attainable_tokens: int = 0


async def measure(workload: Workload, engines: dict[str, EngineClient], requests: int, seed: int) -> Cell:
    for engine in engines.values():
        await engine.flush()
    rng = np.random.default_rng(seed)
    talks = workload.make(rng, lambda count: engines[WITH].make_prompt(rng, count), requests)
    so_far: dict[str, list[Tokens]] = {name: [[] for _ in talks] for name in engines}
    cell, seen = Cell(), Analysis(id_units(1), max_bytes=0, has_times=False)
    pairs = [(number, piece) for turn in zip_longest(*talks) for number, piece in enumerate(turn) if piece is not None]
    for place, (number, piece) in enumerate(tqdm(pairs, workload.name, leave=False)):
        for name in (WITH, WITHOUT) if place % 2 == 0 else (WITHOUT, WITH):
            history = so_far[name]
            prompt = history[number] + piece
            began = time.process_time()
            reply = await engines[name].send_call(Call(prompt=prompt, max_tokens=workload.answer, stream=True))
            await asyncio.sleep(SETTLE_S)
            history[number] = prompt + reply.output
            taken = {"ttft": reply.ttft, "total": reply.total, "cpu": time.process_time() - began}
            for measure_name, seconds in taken.items():
                cell.seconds[measure_name][name].append(seconds)
            if name == WITH:
                count(cell, seen, prompt, reply)
            elif reply.cached_tokens:
                raise SystemExit(f"{workload.name}: the engine without a cache found {reply.cached_tokens} tokens")
    cell.attainable_tokens = seen.totals.endless_hits
    return cell


async def fill(engine: EngineClient, rng: np.random.Generator, context: int) -> None:
    """Use every slot of the pool once: the system gives memory only when it is written to for the first time."""
    length = min(LONG, context - 8)
    for _ in tqdm(range(-(-POOL // length)), "filling the pool", leave=False):
        await engine.send_call(Call(prompt=engine.make_prompt(rng, length), max_tokens=1))


def count(cell: Cell, seen: Analysis, prompt: Tokens, reply: Reply) -> None:
    cell.prompt_tokens += reply.prompt_tokens
    cell.cached_tokens += reply.cached_tokens or 0
    key, output = array("i", prompt).tobytes(), array("i", reply.output).tobytes()
    asked, answered = len(prompt), len(reply.output)
    seen.add_request(
        LoggedRequest(prompt=key, prompt_tokens=asked, outputs=(output,), output_tokens=answered, has_outputs=True)
    )


def described(workload: Workload, cell: Cell) -> dict[str, Any]:
    """JSON. Differences are those of the cache to no cache, as a share of the mean time without it."""
    report: dict[str, Any] = {
        "workload": workload.name,
        "shared": workload.shared,
        "published_percent": workload.published,
        "requests": len(cell.seconds["ttft"][WITH]),
        "prompt_tokens": cell.prompt_tokens,
        "hit_rate": cell.cached_tokens / cell.prompt_tokens,
        "attainable": cell.attainable_tokens / cell.prompt_tokens,
    }
    for measure_name, times in cell.seconds.items():
        whole = mean(times[WITHOUT])
        report[measure_name] = {
            "cache_ms": 1e3 * mean(times[WITH]),
            "no_cache_ms": 1e3 * whole,
            "difference": difference(times[WITH], times[WITHOUT], [whole] * len(times[WITH])),
            "cache_s": times[WITH],
            "no_cache_s": times[WITHOUT],
        }
    return report


def verdict(difference: dict[str, float]) -> str:
    """The verdict on a cost that should be zero."""
    mean_, half = difference["mean"], difference["half_width"]
    if mean_ + half < GOAL_SHARE or abs(mean_) <= half <= WIDEST:
        return "met"
    return "missed" if mean_ - half > GOAL_SHARE else "undecided"


def show(report: dict[str, Any]) -> None:
    print(f"\n{report['device']}, {report['threads']} threads, {report['model']}; {report['precision']}; times in ms")
    print(
        f"{'workload':<22}{'requests':>9}{'tokens':>8}{'hit rate':>10}{'attainable':>12}{'published':>11}"
        f"{'TTFT':>9}{'no cache':>10}{'difference of pairs':>22}{'times':>7}"
    )
    for row in report["workloads"]:
        ttft, (low, high) = row["ttft"], row["published_percent"]
        spread = f"{100 * ttft['difference']['mean']:+.1f} ± {100 * ttft['difference']['half_width']:.1f} %"
        print(
            f"{row['workload']:<22}{row['requests']:>9}{row['prompt_tokens'] / row['requests']:>8.0f}"
            f"{row['hit_rate']:>10.1%}{row['attainable']:>12.1%}{f'{low}-{high} %':>11}"
            f"{ttft['cache_ms']:>9.1f}{ttft['no_cache_ms']:>10.1f}{spread:>22}"
            f"{ttft['no_cache_ms'] / ttft['cache_ms']:>7.2f}"
        )
    print(f"\npublished: {PUBLISHED}; {PUBLISHED_NOTE}.")
    for what, found in report["cost_where_nothing_is_shared"].items():
        share, half = 100 * found["mean"], 100 * found["half_width"]
        print(f"nothing shared: the cache adds {share:+.2f} ± {half:.2f} % to the {what} ({found['verdict']})")


async def run(args: argparse.Namespace) -> dict[str, Any]:
    config = LLAMA_TINY if args.tiny else LLAMA_40M
    workloads = [workload for workload in WORKLOADS if args.only in workload.name]
    with tempfile.TemporaryDirectory() as folder:
        write_dummy_model(Path(folder), config)
        settings = {
            "model_path": folder,
            "load_format": "dummy",
            "device": "cpu",
            "dtype": args.dtype,
            "max_total_tokens": POOL,
            "max_running_requests": 4,
            "linear_backend": args.linear_backend,
            "chunked_prefill_size": CHUNK,
        }
        engines = {WITH: EngineClient(settings), WITHOUT: EngineClient(settings | {"disable_radix_cache": True})}
        try:
            for engine in engines.values():
                await engine.open_session()
                await fill(engine, np.random.default_rng(args.seed), config["max_position_embeddings"])
            await measure(WORKLOADS[-1], engines, 4, args.seed)
            report: dict[str, Any] = about_this_run("cpu") | {
                "model": "llama-tiny" if args.tiny else "llama-40m",
                "precision": args.dtype,
                "published": f"{PUBLISHED}; {PUBLISHED_NOTE}",
                "workloads": [],
                "cost_where_nothing_is_shared": {},
            }
            for workload in workloads:
                cell = await measure(workload, engines, args.requests or workload.requests, args.seed)
                report["workloads"].append(described(workload, cell))
        finally:
            for engine in engines.values():
                await engine.close()
    for row in report["workloads"]:
        if row["attainable"] == 0:
            for name, what in MEASURES.items():
                found = row[name]["difference"]
                report["cost_where_nothing_is_shared"][what] = found | {"verdict": verdict(found)}
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=0, help="of each workload; default: 60, of random prompts 200")
    parser.add_argument("--only", default="", help="the workloads whose name contains this")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="float32")
    parser.add_argument("--linear-backend", choices=("torch", "transposed", "onednn", "numba"), default="torch")
    parser.add_argument("--tiny", action="store_true", help="a model that computes next to nothing, for a quick look")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    report = asyncio.run(run(args))
    if not report["workloads"]:
        parser.error(f"--only {args.only}: there are {', '.join(workload.name for workload in WORKLOADS)}")
    show(report)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "prefix_workloads.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
