"""Compares how many tokens fit in the same memory with a pool for layers with a sliding window, and without.

    python -m benchmarks.core.window_pools [--gib 16] [--ranking]

For each shape, `plan_memory` divides the memory twice: for two pools, and for one pool for all layers. Then the pools
are allocated, and the bytes of their tensors are added up: they must be the bytes of the plan. The memory of zeros that
nothing touches is not used, so the pools may be larger than the machine's memory. Prints a table in Markdown.

--ranking measures instead what it takes to choose what is evicted from the window pool, by the nodes of the tree with
slots there: many short prompts behind a shared beginning, the worst case.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from baton.memory_pool.kv_pool import KVPool, KVShape, kv_bytes_per_token, make_kv_pool
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.memory_pool.window_pages import WindowedAllocator, WindowPages
from baton.radix.cache import RadixCache
from baton.radix.node_windows import NodeWindows
from baton.runtime.runner.memory_plan import MemoryPlan, MemorySettings, plan_memory
from baton.scheduler.config import DEFAULT_CHUNK, SchedulerConfig

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """The attention of a model, as its config.json says."""

    name: str
    layers: int
    full_layers: int
    kv_heads: int
    head_dim: int
    window: int
    context: int

    def layers_of(self, *, windows: bool) -> list[KVShape]:
        """Layers with a window, or all others."""
        count = self.layers - self.full_layers if windows else self.full_layers
        return [KVShape(self.kv_heads, self.head_dim, self.head_dim)] * count


SHAPES = (
    Shape("Gemma 3 4B", 34, 5, 4, 256, 1024, 131072),
    Shape("Gemma 3 27B", 62, 10, 16, 128, 1024, 131072),
    Shape("Gemma 2 9B", 42, 21, 8, 256, 4096, 8192),
    Shape("gpt-oss-20b", 24, 12, 8, 64, 128, 131072),
    Shape("gpt-oss-120b", 36, 18, 8, 64, 128, 131072),
)


@dataclass(frozen=True)
class Measured:
    """How many tokens one model holds in a given memory."""

    one: MemoryPlan
    """One pool for all layers."""
    two: MemoryPlan
    bytes_of_one: int
    """Bytes of the tensors."""
    bytes_of_two: int

    @property
    def gain(self) -> float:
        return self.two.kv_tokens / self.one.kv_tokens


def measure(shape: Shape, memory: int, requests: int, context: int, page_size: int = 16) -> Measured:
    """memory: bytes for the pools. requests: that run at the same time, in bfloat16."""
    full, windows = shape.layers_of(windows=False), shape.layers_of(windows=True)
    of_full, of_windows = (kv_bytes_per_token(layers, torch.bfloat16) for layers in (full, windows))
    settings = MemorySettings(
        mem_fraction_static=1.0,
        context_length=min(context, shape.context),
        num_rows=requests + SchedulerConfig.max_leased_requests,
        page_size=page_size,
        chunked_prefill_size=DEFAULT_CHUNK,
    )
    plan = partial(plan_memory, settings, available=memory, weight_bytes=0, is_cpu=False)
    one = plan(bytes_per_token=of_full + of_windows)
    two = plan(bytes_per_token=of_full, bytes_per_window_token=of_windows, window=shape.window)
    make = partial(make_kv_pool, page_size=page_size, dtype=torch.bfloat16, device=torch.device("cpu"))
    bytes_of_one = _bytes_of(make(num_tokens=one.kv_tokens, shapes=[*full, *windows]))
    bytes_of_two = _bytes_of(make(num_tokens=two.kv_tokens, shapes=full))
    bytes_of_two += _bytes_of(make(num_tokens=two.window_tokens, shapes=windows))
    return Measured(one, two, bytes_of_one, bytes_of_two)


def _bytes_of(pool: KVPool) -> int:
    return sum(tensor.nbytes for tensor in (*pool.k, *pool.v))


def rank(prompts: int, own: int = 25, shared: int = 40) -> tuple[int, float]:
    """A tree of so many prompts. Returns its nodes with slots, and the seconds of an eviction: the median of five."""
    tokens = prompts * (own + shared)
    pages = WindowPages(tokens, tokens, 1, 1024)
    allocator, rows = WindowedAllocator(pages, tokens), ReqToTokenPool(1, own + shared)
    cache = RadixCache(rows, allocator, page_size=1, windows=NodeWindows(pages))
    assert cache.windows is not None
    rng = np.random.default_rng(1)
    beginning = rng.integers(0, 1000, shared).astype(np.int32)
    for _ in range(prompts):
        ids = np.append(beginning, rng.integers(0, 1000, own).astype(np.int32))
        row = rows.alloc()
        assert row is not None
        sequence = cache.open_sequence("", cache.match_prefix("", ids[:-1]), row)
        old, new = np.array([sequence.length], dtype=np.int32), np.array([len(ids)], dtype=np.int32)
        slots = allocator.alloc_extend(old, new, old)
        assert slots is not None
        rows.write(row, sequence.length, slots)
        sequence.length = len(ids)
        cache.cache_finished_req(sequence, ids)
    nodes, times = len(cache.windows.listed()), []
    for _ in range(5):
        begun = time.perf_counter()
        cache.evict_windows(own)
        times.append(time.perf_counter() - begun)
    return nodes, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=16.0, help="memory for the pools")
    parser.add_argument("--context-length", type=int, default=16384)
    parser.add_argument("--ranking", action="store_true", help="measure evictions instead")
    arguments = parser.parse_args()
    if arguments.ranking:
        for prompts in (100, 1000, 5000):
            nodes, seconds = rank(prompts)
            print(f"{nodes} nodes: {1e3 * seconds:.2f} ms, {1e6 * seconds / nodes:.1f} µs each")
        return
    memory = int(arguments.gib * GIB)
    print("| model | requests | one pool | KV pool | of windows | tokens, by one pool's | bytes, by one pool's |")
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for requests in (8, 64):
            found = measure(shape, memory, requests, arguments.context_length)
            one, two = found.one, found.two
            assert (found.bytes_of_one, found.bytes_of_two) == (one.kv_bytes, two.kv_bytes + two.window_bytes)
            print(
                f"| {shape.name} | {requests} | {one.kv_tokens:,} | {two.kv_tokens:,} | {two.window_tokens:,} | "
                f"{found.gain:.2f} | {found.bytes_of_two / found.bytes_of_one:.3f} |"
            )


if __name__ == "__main__":
    main()
