"""Measures the cost of the cache's statistics: the agent trace on two caches in turns, one of them with statistics.

    python -m benchmarks.core.statistics_cost [--jobs 300] [--page-size 1]

Each request's bookkeeping is done on both caches, one right after the other, in changing order, so that other work on
the machine affects both. Prints the median time of a turn on each, the ratio of the two sums without the slowest tenth
of the turns, and its 95 % interval (bootstrap over the turns). Writes benchmarks/results/statistics_cost.json. One
thread.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from baton.radix.kv_lives import KVLives
from baton.radix.kv_sequence import KVSequence
from benchmarks.common.measured import RESULTS
from benchmarks.core.cache_server import CacheServer, random_ids

TURNS, POOL, ROWS, DRAWS = 8, 500_000, 16, 1000


class Watched:
    """A cache and its open sequences; ``counted``: with statistics."""

    def __init__(self, page_size: int, *, counted: bool) -> None:
        self.server = CacheServer(POOL, ROWS, 8192, page_size)
        self.lives = KVLives(self.server.cache) if counted else None
        self.running: deque[KVSequence] = deque()

    def begin(self, ids: np.ndarray, prompt_len: int) -> float:
        """Seconds that it took."""
        started = time.perf_counter()
        if self.lives is not None:
            self.lives.set_time(started)
        seq = self.server.start(ids[:prompt_len], prompt_len)
        self.server.cache.cache_unfinished_req(seq, ids[:prompt_len])
        self.server.extend(seq, len(ids))
        self.server.rows.take_updates()
        self.running.append(seq)
        return time.perf_counter() - started

    def end(self, ids: np.ndarray) -> float:
        seq = self.running.popleft()
        started = time.perf_counter()
        self.server.cache.cache_finished_req(seq, ids)
        return time.perf_counter() - started


def agent_turns(active: int, num_jobs: int) -> Iterator[tuple[np.ndarray, int]]:
    """(ids, prompt length) of each turn, in order: as in `cache_server.Trace`."""
    rng, choose = np.random.default_rng(0), random.Random(0)
    prompts = [random_ids(rng, 500) for _ in range(20)]
    jobs = [(prompts[choose.randrange(20)], 0) for _ in range(active)]
    started = active
    while jobs:
        at = choose.randrange(len(jobs))
        before, turn = jobs[at]
        new_in, new_out = choose.randint(75, 225), choose.randint(75, 225)
        ids = np.concatenate([before, random_ids(rng, new_in + new_out)])
        yield ids, len(ids) - new_out
        if turn + 1 < TURNS:
            jobs[at] = ids, turn + 1
        elif started < num_jobs:
            jobs[at], started = (prompts[choose.randrange(20)], 0), started + 1
        else:
            jobs.pop(at)


def measure(active: int, num_jobs: int, page_size: int) -> np.ndarray:
    """float64 [turns, 2]: µs of each turn, without and with statistics."""
    caches = [Watched(page_size, counted=False), Watched(page_size, counted=True)]
    open_ids: deque[np.ndarray] = deque()
    times: list[tuple[float, float]] = []
    for number, (ids, prompt_len) in enumerate(agent_turns(active, num_jobs)):
        taken = [0.0, 0.0]
        order = (0, 1) if number % 2 else (1, 0)
        if len(open_ids) == ROWS:
            ended = open_ids.popleft()
            for which in order:
                taken[which] += caches[which].end(ended)
        for which in order:
            taken[which] += caches[which].begin(ids, prompt_len)
        open_ids.append(ids)
        times.append((taken[0] * 1e6, taken[1] * 1e6))
    assert caches[0].server.cache.evicted_total == caches[1].server.cache.evicted_total > 0
    return np.array(times)


def ratio(times: np.ndarray) -> float:
    """Ratio of the sums, without the slowest tenth of the turns."""
    usual = times[times.sum(axis=1) <= np.quantile(times.sum(axis=1), 0.9)]
    return float(usual[:, 1].sum() / usual[:, 0].sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300, help="active at a time; with 300 the pool is too small")
    parser.add_argument("--all-jobs", type=int, default=2000)
    parser.add_argument("--page-size", type=int, default=1)
    args = parser.parse_args()
    gc.freeze()
    times = measure(args.jobs, args.all_jobs, args.page_size)[1000:]
    rng = np.random.default_rng(0)
    drawn = sorted(ratio(times[rng.integers(0, len(times), len(times))]) for _ in range(DRAWS))
    low, high = drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS)]
    without, counted = np.median(times, axis=0).tolist()
    print(f"{args.jobs} active jobs, page {args.page_size}, {len(times)} turns")
    print(f"{without:.1f} µs a turn, with statistics {counted:.1f}; ratio {ratio(times):.3f} ({low:.3f} to {high:.3f})")
    report = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    report |= vars(args) | {"without_us": without, "with_us": counted, "ratio": ratio(times), "interval": [low, high]}
    (RESULTS / "statistics_cost.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
