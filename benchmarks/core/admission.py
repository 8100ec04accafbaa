"""Admission of many requests at once on one long cached prefix: the time of one `next_batch`. No model.

    python -m benchmarks.core.admission [--requests 64] [--prefix 100000]

    different   each request continues with its own tokens: all are admitted in one step
    the same    all continue with the same 64 tokens: one is admitted, the others wait to find them in the cache

It also measures two parts: finding the shared prefixes (`SharedPrefixes`), and the look-up of the prefix, once for each
request, from which its admission continues. Prints a table, writes admission.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.radix.cache import RadixCache
from baton.scheduler.batch import ScheduleBatch, StepResult
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.memory.shared_prefixes import SharedPrefixes
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.scheduler import Scheduler
from baton.scheduler.token_buffer import pack_ids
from benchmarks.common.measured import RESULTS, about_this_run

GOAL_MS = 2.0
"""Goal of the second column, for 64 requests on 100,000 tokens."""

Row = tuple[str, float, float, float]


def spec(rid: str, ids: np.ndarray) -> RequestSpec:
    return RequestSpec(rid=rid, input_ids=pack_ids(ids), sampling=SamplingParams(max_new_tokens=1, temperature=0.0))


def finish(scheduler: Scheduler, batch: ScheduleBatch) -> None:
    scheduler.process_result(StepResult.of_rows([[1] if samples else [] for samples in batch.samples]), 0.0)


class Timed:
    """Adds up the time of a method, for all objects of its class."""

    def __init__(self, owner: type, name: str) -> None:
        self.ms = 0.0
        inner = getattr(owner, name)

        def timed(*arguments: Any, **more: Any) -> Any:
            begin = time.perf_counter()
            answer = inner(*arguments, **more)
            self.ms += 1e3 * (time.perf_counter() - begin)
            return answer

        setattr(owner, name, timed)


def measure(requests: int, prefix: int, rounds: int, sharing: Timed, lookups: Timed) -> list[Row]:
    context = prefix + 256
    config = SchedulerConfig(
        context_length=context,
        max_total_tokens=2 * prefix + 4096 * requests,
        max_running_requests=requests,
        max_leased_requests=1,
        chunked_prefill_size=prefix + 4096 * requests,
    )
    rows, allocator = ReqToTokenPool(config.num_rows, context), Allocator(config.max_total_tokens)
    scheduler = Scheduler(config, rows, allocator, RadixCache(rows, allocator, page_size=1), ())
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 100_000, prefix).astype(np.int32)
    scheduler.add_request(spec("first", shared), 0.0)
    while (batch := scheduler.next_batch(0.0)) is not None:
        finish(scheduler, batch)
    found: dict[str, list[tuple[float, float, float]]] = {"different": [], "the same": []}
    for turn in range(rounds):
        for name, times in found.items():
            tail = rng.integers(0, 100_000, 64)
            for number in range(requests):
                own = rng.integers(0, 100_000, 64) if name == "different" else tail
                scheduler.add_request(spec(f"{turn} {name} {number}", np.append(shared, own).astype(np.int32)), 0.0)
            sharing.ms, lookups.ms, begin = 0.0, 0.0, time.perf_counter()
            batch = scheduler.next_batch(0.0)
            times.append((1e3 * (time.perf_counter() - begin), sharing.ms - lookups.ms, lookups.ms))
            assert batch is not None and len(batch) == (requests if name == "different" else 1)
            while batch is not None:
                finish(scheduler, batch)
                batch = scheduler.next_batch(0.0)
    medians = {name: np.median(np.array(times), axis=0).tolist() for name, times in found.items()}
    return [(name, *values) for name, values in medians.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "admission.json")
    args = parser.parse_args()
    timed = Timed(SharedPrefixes, "will_be_cached"), Timed(RadixCache, "find_prefix")
    table = measure(args.requests, args.prefix, args.rounds, *timed)
    print(f"ms for {args.requests} requests on {args.prefix} cached tokens; goal for sharing: {GOAL_MS}")
    print(f"{'':12s}{'next_batch':>12s}{'sharing':>10s}{'look-ups':>10s}")
    for name, total, sharing, lookups in table:
        print(f"{name:12s}{total:12.2f}{sharing:10.2f}{lookups:10.2f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**about_this_run("cpu"), "goal_ms": GOAL_MS, "rows": table}, indent=1))


if __name__ == "__main__":
    main()
