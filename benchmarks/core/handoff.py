"""Measures the scheduler's cost of a handoff, for parents of 1k to 128k tokens. No model: results are made up.

    python -m benchmarks.core.handoff

Three rows: the handoff itself (claim, admission, transfer of row and lock); `add` + `next_batch` for the child; and the
same two calls for an ordinary request that sends the whole prompt again and finds it in the tree.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.radix.cache import RadixCache
from baton.scheduler.batch import StepResult
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.request_spec import ContinuationSpec, RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.scheduler import Scheduler
from baton.scheduler.token_buffer import pack_ids
from benchmarks.common.measured import RESULTS

SUFFIX = [1, 2, 3]


def make_scheduler(context: int, page_size: int) -> Scheduler:
    tokens = -(-4 * context // page_size) * page_size
    config = SchedulerConfig(
        context_length=context,
        max_total_tokens=tokens,
        max_running_requests=4,
        max_leased_requests=4,
        max_leased_ratio=1.0,
        chunked_prefill_size=context,
        page_size=page_size,
    )
    pool = ReqToTokenPool(config.num_rows, context)
    allocator = Allocator(tokens, page_size)
    return Scheduler(config, pool, allocator, RadixCache(pool, allocator, page_size=page_size), ())


def finish(scheduler: Scheduler) -> None:
    while (batch := scheduler.next_batch(0.0)) is not None:
        scheduler.process_result(StepResult.of_rows([[7]] * len(batch)), 0.0)


def measure(length: int, page_size: int, rounds: int) -> dict[str, float]:
    """Medians in µs."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_new_tokens=3, temperature=0.0)
    times: dict[str, list[float]] = {"handoff": [], "add + next_batch, handoff": [], "add + next_batch, tree": []}
    scheduler = make_scheduler(length + 64, page_size)
    opened: list[float] = []

    def timed(function: Callable) -> Callable:
        def call(*args):
            start = time.perf_counter()
            result = function(*args)
            opened.append(time.perf_counter() - start)
            return result

        return call

    memory, leases = scheduler._memory, scheduler._leases
    mock.patch.object(memory, "_open_lease", timed(memory._open_lease)).start()
    mock.patch.object(leases, "claim", timed(leases.claim)).start()
    for round_number in range(rounds):
        prompt = rng.integers(0, 30000, length).astype(np.int32)
        parent = RequestSpec(rid=f"p{round_number}", input_ids=pack_ids(prompt), sampling=sampling, retain_ttl=1e9)
        scheduler.add_request(parent, 0.0)
        finish(scheduler)
        child = RequestSpec(
            rid=f"c{round_number}",
            input_ids=pack_ids(SUFFIX),
            sampling=sampling,
            continuation=ContinuationSpec(parent.rid),
        )
        opened.clear()
        start = time.perf_counter()
        scheduler.add_request(child, 0.0)
        batch = scheduler.next_batch(0.0)
        times["add + next_batch, handoff"].append(time.perf_counter() - start)
        assert batch is not None and batch.extend_lens.tolist() == [len(SUFFIX) + 1]
        times["handoff"].append(sum(opened))
        scheduler.process_result(StepResult.of_rows([[7]]), 0.0)
        finish(scheduler)
        whole = pack_ids(np.concatenate([prompt, [7, 7, 7], SUFFIX]))
        again = RequestSpec(rid=f"a{round_number}", input_ids=whole, sampling=sampling)
        start = time.perf_counter()
        scheduler.add_request(again, 0.0)
        batch = scheduler.next_batch(0.0)
        times["add + next_batch, tree"].append(time.perf_counter() - start)
        assert batch is not None
        scheduler.process_result(StepResult.of_rows([[7]]), 0.0)
        finish(scheduler)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 32768, 131072])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS / "handoff.json")
    args = parser.parse_args()
    results = []
    print(f"{'page':>4}  {'what (median µs)':<28}" + "".join(f"{length:>10}" for length in args.lengths))
    for page_size in args.page_sizes:
        columns = [measure(length, page_size, args.rounds) for length in args.lengths]
        for name in columns[0]:
            print(f"{page_size:>4}  {name:<28}" + "".join(f"{column[name]:>10.1f}" for column in columns))
        results += [
            {"page_size": page_size, "length": length, **column} for length, column in zip(args.lengths, columns)
        ]
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(
        json.dumps({"machine": platform.machine(), "rounds": args.rounds, "results": results}, indent=1)
    )
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
