"""Measures how fast blocks of KV are copied from the host pool's pages to a disk and back, by the store's thread. No
model.

    python -m benchmarks.core.block_io --folder /a/folder/on/the/disk

Blocks of 64 tokens, each as 64 pages of one token or as one page of 64. Pages of one token are scattered ("apart") or
neighbours in order ("in order"), as an allocator with and without history hands them out. "store" and "load" put all
blocks in the queue and wait for the last completion. Files are not flushed and stay in the page cache, so this measures
the system calls, not the disk; "from disk" is a load after a request to drop the files from the cache, which the system
may ignore.

"memcpy" is np.copyto of the same size between two arrays, measured just before each: other work on the machine slows
both. "counting" is the speed of a thread that counts in Python meanwhile, divided by its speed alone; it offers the GIL
every 50 µs, as one that calls torch does. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from baton.memory_pool.stores.disk_pool import DiskPool
from baton.runtime.kv_transfer.block_io import BlockIO
from benchmarks.common.measured import RESULTS, about_this_run

MIB = 2**20
BLOCK_TOKENS = 64
TOKEN_BYTES = {"40M": 2 * 8 * 4 * 64 * 4, "large": 2 * 32 * 8 * 128 * 2}
"""K and V of 8 layers × 4 heads × 64, float32; of 32 × 8 × 128, bfloat16."""
WAYS = {"page 1, apart": (1, True), "page 1, in order": (1, False), "page 64": (64, False)}


class Counter:
    """A thread that counts in Python."""

    def __init__(self) -> None:
        self.counted = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._count)
        self._thread.start()
        time.sleep(0.05)
        self.alone = self.rate_during(lambda: time.sleep(0.2))

    def rate_during(self, work: Any) -> float:
        before, start = self.counted, time.perf_counter()
        work()
        return (self.counted - before) / (time.perf_counter() - start)

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _count(self) -> None:
        while not self._done.is_set():
            for _ in range(1000):
                pass
            self.counted += 1
            time.sleep(0)


class Case:
    """move_mib of blocks in the memory of a pool that holds as much again, and a folder for them."""

    def __init__(self, model: str, way: str, move_mib: int, folder: Path) -> None:
        page_tokens, apart = WAYS[way]
        block_bytes = BLOCK_TOKENS * TOKEN_BYTES[model]
        self.blocks = max(move_mib * MIB // block_bytes, 1)
        per_block = BLOCK_TOKENS // page_tokens
        pages = 2 * self.blocks * per_block
        rng = np.random.default_rng(0)
        self.memory = np.ones((pages + 1, page_tokens * TOKEN_BYTES[model]), np.uint8)
        numbers = rng.permutation(pages) if apart else np.arange(pages)
        self.pages = numbers[: self.blocks * per_block].reshape(self.blocks, per_block) + 1
        self.keys = [rng.bytes(20) for _ in range(self.blocks)]
        self.bytes = self.blocks * block_bytes
        self.folder = folder
        self.block_bytes, self.model = block_bytes, model.encode()
        self.open_store()
        self.ours, self.theirs = np.ones(self.bytes, np.uint8), np.ones(self.bytes, np.uint8)

    def open_store(self) -> None:
        self.pool = DiskPool(self.folder, 2 * self.bytes + 100 * MIB, self.block_bytes, self.model)
        self.woken = threading.Semaphore(0)
        self.io = BlockIO(self.pool, self.memory, self.bytes, wake=self.woken.release)

    def close(self) -> None:
        assert self.io.close(60)
        self.pool.close()

    def clear(self) -> None:
        self.close()
        shutil.rmtree(self.folder)
        self.open_store()

    def drop_cache(self) -> None:
        os.sync()
        for file in self.folder.rglob("??/*"):
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def store(self) -> None:
        assert all(self.io.store_block(key, pages, key) for key, pages in zip(self.keys, self.pages))
        self._wait(self.blocks)

    def load(self) -> None:
        assert self.io.load_blocks(self.keys, self.pages, "load", float("inf"))
        assert self._wait(1) == self.blocks

    def memcpy(self) -> None:
        np.copyto(self.theirs, self.ours)

    def _wait(self, count: int) -> int:
        blocks = 0
        while count:
            self.woken.acquire()
            for done in self.io.poll():
                blocks, count = blocks + done.blocks, count - 1
        return blocks


def seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    steps = {"store": (case.clear, case.store), "load": (None, case.load), "from disk": (case.drop_cache, case.load)}
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    case.memcpy()
    for _ in range(rounds):
        for name, (before, call) in steps.items():
            if before is not None:
                before()
            plain, took = seconds(case.memcpy), seconds(call)
            taken[name].append((plain, took, float("nan")))
    for name, (before, call) in steps.items():
        counter = Counter()
        for number, (plain, took, _) in enumerate(taken[name]):
            if before is not None:
                before()
            taken[name][number] = plain, took, counter.rate_during(call) / counter.alone
        counter.stop()
    return [
        {
            "step": name,
            "mib": case.bytes / MIB,
            "mib_per_s": statistics.median(case.bytes / took / MIB for _, took, _ in rows),
            "of_memcpy": statistics.median(plain / took for plain, took, _ in rows),
            "counting": statistics.median(counted for _, _, counted in rows),
        }
        for name, rows in taken.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=TOKEN_BYTES, default=[*TOKEN_BYTES])
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default where temporary files go")
    parser.add_argument("--move-mib", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "block_io.json")
    args = parser.parse_args()
    found = []
    print(f"{'model':<6} {'block':>9}  {'pages':<18}{'step':<10}{'MiB/s':>7}{'% of memcpy':>13}{'counting':>10}")
    for model in args.models:
        for way in WAYS:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                case = Case(model, way, args.move_mib, Path(folder))
                rows = measure(case, args.rounds)
                case.close()
            for row in rows:
                print(
                    f"{model:<6} {case.pool.block_bytes / MIB:>5.0f} MiB  {way:<18}{row['step']:<10}"
                    f"{row['mib_per_s']:>7.0f}{100 * row['of_memcpy']:>12.0f}%{100 * row['counting']:>9.0f}%"
                )
                found.append({"model": model, "block_bytes": case.pool.block_bytes, "pages": way} | row)
    args.out.parent.mkdir(exist_ok=True)
    about = about_this_run("cpu")
    args.out.write_text(json.dumps({"about": about, "rounds": args.rounds, "speed": found}, indent=1))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
