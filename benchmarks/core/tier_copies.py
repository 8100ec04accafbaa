"""Measures copies of pages between a CPU's KV pool and host memory, relative to one thread's memcpy. No model.

    python -m benchmarks.core.tier_copies

Pages are scattered on both sides. Each measurement is paired with a memcpy of the same size (np.copyto, contiguous)
taken just before it, and percentages are medians of such pairs: other work on the machine slows both. Rounds swap the
order. Memory was touched before. Methods:

    numba, numpy, torch   the functions of memory_pool/stores/host_copies.py
    index_copy            what `copy_kv` does: index_select, then index_copy_, layer by layer

The second table shows the speed of a thread that counts in Python during a copy, divided by its speed alone, and the
slowdown of the copy: a method that holds the GIL stops the thread. The counting thread releases the GIL every 50 µs,
like one that calls torch. Both are ratios of the best rounds, since other work on the cores can only slow them down;
"memcpy", which needs no GIL, shows the effect of that. "threads" is the CPU time of a copy divided by its duration: at
most 1.0 if it runs only on its caller's thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.memory_pool.kv_pool import MHAKVPool, uniform_shapes
from baton.memory_pool.stores.host_copies import PagedLayers, copies_for, copy_pages_numpy, copy_pages_torch
from baton.memory_pool.stores.host_pool import HostPool
from benchmarks.common.measured import RESULTS, about_this_run

CPU = torch.device("cpu")
MODELS = {"40M": (8, 4, 64), "large": (32, 8, 128)}
"""Layers, KV heads, head size."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MIB = 2**20


def index_copy(source: PagedLayers, target: PagedLayers, source_pages: np.ndarray, target_pages: np.ndarray) -> None:
    here, there = torch.from_numpy(source_pages), torch.from_numpy(target_pages)
    for ours, theirs in zip(source.planes, target.planes, strict=True):
        theirs.view(torch.int64).index_copy_(0, there, ours.view(torch.int64).index_select(0, here))


def ways() -> dict[str, Any]:
    name, best = copies_for(CPU)
    found = {name: best} if name == "numba" else {}
    return found | {"numpy": copy_pages_numpy, "torch": copy_pages_torch, "index_copy": index_copy}


@dataclass
class Case:
    """Two pools of pool_mib each, touched, and pages of move_mib to go between them."""

    model: str
    dtype: str
    page_size: int
    pool_mib: int
    move_mib: int

    def __post_init__(self) -> None:
        layers, heads, size = MODELS[self.model]
        page = self.page_size * 2 * layers * heads * size * DTYPES[self.dtype].itemsize
        pages = max(self.pool_mib * MIB // page, 4)
        self.pool = MHAKVPool(
            num_tokens=pages * self.page_size,
            page_size=self.page_size,
            shapes=uniform_shapes(layers, heads, size),
            dtype=DTYPES[self.dtype],
            device=CPU,
        )
        for layer in (*self.pool.k, *self.pool.v):
            layer.view(torch.uint8).fill_(1)
        self.host = HostPool(self.pool, pages * self.page_size)
        self.host.pages_view[:] = 2
        rng = np.random.default_rng(0)
        count = max(self.move_mib * MIB // page, 1)
        device_pages, host_pages = (rng.permutation(pages)[:count] + 1 for _ in range(2))
        self.bytes = count * page
        self.device_slots, self.host_slots = (
            (numbers[:, None] * self.page_size + np.arange(self.page_size)).ravel().astype(np.int32)
            for numbers in (device_pages, host_pages)
        )

    def calls(self) -> dict[tuple[str, str], Callable[[], None]]:
        """(way, direction) -> a copy of ``bytes``."""
        found = {}
        for name, copy in ways().items():
            found[name, "store"] = self._with(copy, lambda: self.host.store(self.device_slots, self.host_slots))
            found[name, "load"] = self._with(copy, lambda: self.host.load(self.host_slots, self.device_slots))
        return found

    def _with(self, copy: Any, call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            self.host._copy_pages = copy
            call()

        return run


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_speed(case: Case, rounds: int) -> list[dict[str, Any]]:
    ours, theirs = np.ones(case.bytes, np.uint8), np.ones(case.bytes, np.uint8)
    memcpy = lambda: np.copyto(theirs, ours)  # noqa: E731
    calls = case.calls()
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in calls}
    memcpy()
    for call in calls.values():
        call()
    for number in range(rounds):
        for key in sorted(calls, reverse=bool(number % 2)):
            plain = seconds(memcpy)
            pairs[key].append((plain, seconds(calls[key])))
    return [
        {
            "model": case.model,
            "dtype": case.dtype,
            "page_size": case.page_size,
            "way": way,
            "direction": direction,
            "mib": case.bytes / MIB,
            "gb_per_s": statistics.median(case.bytes / taken / 1e9 for _, taken in measured),
            "memcpy_gb_per_s": statistics.median(case.bytes / plain / 1e9 for plain, _ in measured),
            "of_memcpy": statistics.median(plain / taken for plain, taken in measured),
        }
        for (way, direction), measured in pairs.items()
    ]


def beside_counting(copy: Callable[[], None]) -> tuple[float, float, float, float]:
    """Counts per second alone and during one copy; copies per second alone and beside the counting."""
    counted, done = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            for _ in range(1000):
                pass
            counted += 1
            time.sleep(0)

    def rate(work: Callable[[], None]) -> tuple[float, float]:
        before, start = counted, time.perf_counter()
        work()
        taken = time.perf_counter() - start
        return (counted - before) / taken, taken

    alone = seconds(copy)
    thread = threading.Thread(target=count)
    thread.start()
    undisturbed, _ = rate(lambda: time.sleep(0.05))
    during, taken = rate(copy)
    done.set()
    thread.join()
    return undisturbed, during, 1 / alone, 1 / taken


def measure_gil(case: Case, rounds: int) -> list[dict[str, Any]]:
    rows = []
    ours, theirs = np.ones(case.bytes, np.uint8), np.ones(case.bytes, np.uint8)
    calls = {("memcpy", ""): lambda: np.copyto(theirs, ours)} | case.calls()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)
    for (way, direction), copy in calls.items():
        copy()
        counting, counting_beside, copying, copying_beside = zip(*(beside_counting(copy) for _ in range(rounds)))
        cpu = time.process_time()
        taken = seconds(copy)
        rows.append(
            {
                "model": case.model,
                "dtype": case.dtype,
                "page_size": case.page_size,
                "way": way,
                "direction": direction,
                "mib": case.bytes / MIB,
                "counting_beside": max(counting_beside) / max(counting),
                "copying_beside": max(copying_beside) / max(copying),
                "threads": (time.process_time() - cpu) / taken,
            }
        )
    sys.setswitchinterval(interval)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--pool-mib", type=int, default=512, help="of each pool")
    parser.add_argument("--move-mib", type=int, default=128, help="per copy")
    parser.add_argument("--gil-move-mib", type=int, default=64, help="per copy beside a thread that counts")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS / "tier_copies.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    speed, gil = [], []
    print(f"{'model':<6} {'dtype':<9}{'page':>5}  {'way':<11}{'direction':<10}{'GB/s':>6}{'% of memcpy':>13}")
    for model, dtype, page_size in itertools.product(args.models, args.dtypes, args.page_sizes):
        rows = measure_speed(Case(model, dtype, page_size, args.pool_mib, args.move_mib), args.rounds)
        for row in rows:
            print(
                f"{model:<6} {dtype:<9}{page_size:>5}  {row['way']:<11}{row['direction']:<10}"
                f"{row['gb_per_s']:>6.2f}{100 * row['of_memcpy']:>12.0f}%"
            )
        speed += rows
    print(f"\n{'model':<6} {'page':>5}  {'way':<11}{'direction':<10}{'counting':>9}{'copying':>9}{'threads':>9}")
    for page_size in args.page_sizes:
        rows = measure_gil(Case(args.models[0], args.dtypes[0], page_size, 256, args.gil_move_mib), 15)
        for row in rows:
            print(
                f"{row['model']:<6} {page_size:>5}  {row['way']:<11}{row['direction']:<10}"
                f"{100 * row['counting_beside']:>8.0f}%{100 * row['copying_beside']:>8.0f}%{row['threads']:>9.2f}"
            )
        gil += rows
    args.out.parent.mkdir(exist_ok=True)
    about = about_this_run("cpu")
    args.out.write_text(json.dumps({"about": about, "rounds": args.rounds, "speed": speed, "gil": gil}, indent=1))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
