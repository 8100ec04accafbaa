"""Compares eviction orders on the real radix cache with Belády's optimum, which knows the future.

    python -m benchmarks.cache.eviction [--quick] [--trace FILE ...]

Four synthetic traces (traces.py), pools of 10, 30 and 60 % of the live KV (`Trace.working_set`), three seeds, each
order without and with hints, by which clients announce the future (`is_last_step`, `no_reuse_from`). A trace from a
file (Mooncake's format, hash_trace.py) has neither seeds nor hints. Prints, for each pool, the hit rate and the share
of the gap between lru and the optimum that each order closes, with 95 % intervals over the seeds; then whether the
learned order may be the default. Writes eviction.json and eviction.png. Finished runs are kept in eviction.jsonl, so it
can be stopped and resumed; --fresh starts again, which is necessary when an order or a trace has changed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from benchmarks.cache.belady import optimal_hits
from benchmarks.cache.eviction_report import Run, draw, print_gates, print_table
from benchmarks.cache.hash_trace import BLOCK_TOKENS, read_trace
from benchmarks.cache.replay import replay
from benchmarks.cache.traces import TRACES, Trace
from benchmarks.common.measured import RESULTS, commit, device_name

ORDERS = ("lru", "lfu", "slru", "fifo", "learned")
OPTIMUM = "optimum"
SHARES = (0.1, 0.3, 0.6)


class Wanted(NamedTuple):
    """The replays of one trace. file: path of a recorded trace."""

    trace: str
    seed: int
    requests: int
    file: Path | None = None

    def make(self, block_tokens: int) -> Trace:
        if self.file is not None:
            return read_trace(self.file, block_tokens, self.requests or None)
        return TRACES[self.trace](self.seed, self.requests)


def wanted(args: argparse.Namespace) -> list[Wanted]:
    files = [Wanted(path.stem, 0, args.requests if args.quick else 0, path) for path in args.trace]
    names = args.synthetic if args.synthetic is not None else list(TRACES)
    return [Wanted(name, seed, args.requests) for seed in range(args.seeds) for name in names] + files


def runs_of(asked: Wanted, trace: Trace, done: set[tuple]) -> Iterator[Run]:
    """All pools, orders and hints of a trace that have not been run."""
    content, live = trace.content, trace.working_set()
    queried = sum(content.lengths[request.prompt] for request in trace.requests)
    hinted = any(request.is_last or request.no_reuse_from is not None for request in trace.requests)
    for share in SHARES:
        pool = max(int(share * live), max(content.lengths) + 1)
        arms = [(OPTIMUM, False)] + [(order, hints) for order in ORDERS for hints in (False, True)[: 1 + hinted]]
        for order, hints in arms:
            run = Run(asked.trace, asked.seed, len(trace.requests), share, pool, order, hints, 0.0, 0.0)
            if run.key in done:
                continue
            if order == OPTIMUM:
                yield run._replace(hit_rate=sum(optimal_hits(trace, pool)) / queried)
            else:
                hits, evict_us = replay(trace, pool, order, hints=hints)
                yield run._replace(hit_rate=sum(hits) / queried, evict_us=evict_us)


def run_all(args: argparse.Namespace) -> list[Run]:
    lines = args.out / "eviction.jsonl"
    if args.fresh:
        lines.unlink(missing_ok=True)
    known = [Run(**json.loads(line)) for line in lines.read_text().splitlines()] if lines.exists() else []
    done, found = {run.key for run in known}, []
    asked = wanted(args)
    with lines.open("a") as file, tqdm(total=len(asked), unit="trace", disable=None) as bar:
        for one in asked:
            bar.set_description(f"{one.trace}, seed {one.seed}")
            trace = one.make(args.block_tokens)
            for run in runs_of(one, trace, done):
                file.write(json.dumps(run._asdict()) + "\n")
                file.flush()
                known.append(run)
            found += [run for run in known if run.key[:3] == (one.trace, one.seed, len(trace.requests))]
            bar.update()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="of the synthetic traces (3)")
    parser.add_argument("--requests", type=int, help="of a synthetic trace (6000)")
    parser.add_argument("--synthetic", nargs="*", choices=TRACES, help="only these of the synthetic traces")
    parser.add_argument("--trace", nargs="+", type=Path, default=[], help="recorded traffic, JSONL with hash_ids")
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS, help="tokens that a hash id stands for")
    parser.add_argument("--quick", action="store_true", help="one seed, 1500 requests: only to see it run")
    parser.add_argument("--fresh", action="store_true", help="forget what has been run")
    parser.add_argument("--out", type=Path, default=RESULTS / "eviction")
    args = parser.parse_args()
    args.seeds = args.seeds or (1 if args.quick else 3)
    args.requests = args.requests or (1500 if args.quick else 6000)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = run_all(args)
    print_table(runs)
    print_gates(runs)
    about = {"commit": commit(), "device": device_name("cpu"), "cores": os.cpu_count(), "load": os.getloadavg()}
    (args.out / "eviction.json").write_text(json.dumps(about | {"runs": [run._asdict() for run in runs]}, indent=1))
    draw(runs, args.out / "eviction.png")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
