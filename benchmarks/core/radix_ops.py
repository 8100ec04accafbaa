"""Measures a request's bookkeeping: match, lock, insert, evict, allocate, and a whole agent trace. No model.

    python -m benchmarks.core.radix_ops [--rounds 7] [--only match]

Prints one line per operation: ours (median over rounds, each round runs all operations, in forward order and in reverse
order alternately), the best round, the goal, and the peers' published figures for a 2-core Xeon. The goals of the
decode step are our own, without a published figure. Writes benchmarks/results/radix_ops.json. One thread. To see
whether the machine was busy, compare the median with the best round, and look at the load average printed below the
table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from benchmarks.common.measured import RESULTS
from benchmarks.core.cache_server import CacheServer, Trace, TreeMemory, random_ids, tree_memory


@dataclass
class Operation:
    """One line of the table; times in µs. peers: SGLang 0.5.23 Rust core, SGLang Python, vLLM 0.33, as published."""

    name: str
    goal: float
    peers: tuple[str, str, str]
    measure: Callable[[], float]
    rounds: list[float] = field(default_factory=list)
    note: str = ""


def per_call(call: Callable[[], object], repeats: int) -> float:
    """Mean µs of ``repeats`` calls."""
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats * 1e6


def with_leaves(
    count: int, leaf_tokens: int = 16, spare: int = 0, page_size: int = 1, namespaces: int = 0
) -> CacheServer:
    """A pool full of ``count`` unrelated leaves, with ``spare`` free tokens; in no namespace, or in so many."""
    rng = np.random.default_rng(count)
    server = CacheServer(count * leaf_tokens + spare, page_size=page_size)
    for number, ids in enumerate(random_ids(rng, count * leaf_tokens).reshape(count, leaf_tokens)):
        ids[0] = number  # all differ in the first token, so that each is a leaf of its own
        server.insert(ids, f"{number % namespaces:032x}" if namespaces else "")
    server.rows.take_updates()
    return server


def chain(tokens: int, nodes: int) -> tuple[CacheServer, np.ndarray]:
    """One sequence that lies in the tree as a chain of nodes."""
    server = CacheServer(2 * tokens)
    ids = random_ids(np.random.default_rng(7), tokens)
    for end in np.linspace(0, tokens, nodes + 1, dtype=int)[1:]:
        server.insert(ids[:end])
    assert server.cache.total_nodes == nodes
    return server, ids


def match_all(server: CacheServer, ids: np.ndarray, repeats: int) -> Callable[[], float]:
    return lambda: per_call(lambda: server.cache.match_prefix("", ids), repeats)


def slots_of_match(server: CacheServer, ids: np.ndarray) -> float:
    """open_sequence on a locked match: gather the slots of its nodes, write the row."""
    match = server.cache.match_prefix("", ids)
    server.cache.lock(match.handle)
    elapsed = 0.0
    for _ in range(200):
        row = server.rows.alloc()
        assert row is not None
        begin = time.perf_counter()
        seq = server.cache.open_sequence("", match, row)
        elapsed += time.perf_counter() - begin
        server.cache.release(seq)
    server.rows.take_updates()
    server.cache.unlock(match.handle)
    return elapsed / 200 * 1e6


def lock_unlock(server: CacheServer, ids: np.ndarray, *, locked: bool) -> float:
    cache, handle = server.cache, server.cache.match_prefix("", ids).handle

    def both() -> None:
        cache.lock(handle)
        cache.unlock(handle)

    if not locked:
        return per_call(both, 500)
    cache.lock(handle)
    elapsed = per_call(both, 5000)
    cache.unlock(handle)
    return elapsed


def insert_new(server: CacheServer, repeats: int = 20) -> float:
    """cache_finished_req of 8192 new tokens: insert, row, lock and all."""
    rng = np.random.default_rng(3)
    elapsed = 0.0
    for _ in range(repeats):
        ids = random_ids(rng, 8192)
        ids[0] = -2 - server.cache.total_nodes  # no leaf begins with it
        seq = server.start(ids, len(ids))
        begin = time.perf_counter()
        server.cache.cache_finished_req(seq, ids)
        elapsed += time.perf_counter() - begin
        server.rows.take_updates()
    return elapsed / repeats * 1e6


def match_nothing(server: CacheServer, namespace: str = "", known: int = 0) -> float:
    """Prompts of 8192 tokens, a new one each time, of which nothing is cached, or only so many first tokens."""
    prompts = random_ids(np.random.default_rng(5), 200 * 8192).reshape(200, 8192)
    leaves = list(server.cache.tree.nodes())
    for prompt, leaf in zip(prompts, leaves[:: len(leaves) // 200], strict=False):
        prompt[:known] = np.frombuffer(leaf.key, dtype=np.int32)[:known]
        prompt[known] = -1
    if known:  # what is cached of them is split off once, and not again
        assert all(server.cache.match_prefix(namespace, prompt).device_len == known for prompt in prompts)
    todo = iter(prompts)
    return per_call(lambda: server.cache.match_prefix(namespace, next(todo)), len(prompts))


def evict_many(leaves: int) -> Callable[[], float]:
    def measure() -> float:
        server = with_leaves(leaves)
        assert server.allocator.free_tokens == 0
        begin = time.perf_counter()
        freed = server.cache.evict(10_000)
        elapsed = time.perf_counter() - begin
        assert freed == 10_000
        return elapsed * 1e6

    return measure


def evict_one() -> float:
    server = with_leaves(100_000)
    return per_call(lambda: server.cache.evict(16), 1000)


def trim_one() -> float:
    server = with_leaves(1, leaf_tokens=100_000)
    return per_call(lambda: server.cache.evict(1), 300)


def alloc_or_free(which: str) -> Callable[[], float]:
    def measure() -> float:
        allocator = Allocator(500_000, 1)
        old, new = np.array([0], dtype=np.int32), np.array([8192], dtype=np.int32)
        times = {"alloc": 0.0, "free": 0.0}
        for _ in range(300):
            start = time.perf_counter()
            slots = allocator.alloc_extend(old, new, old)
            middle = time.perf_counter()
            assert slots is not None
            allocator.free(slots)
            times["alloc"] += middle - start
            times["free"] += time.perf_counter() - middle
        return times[which] / 300 * 1e6

    return measure


def decode_slots(page_size: int, bs: int = 256) -> Callable[[], float]:
    """alloc_extend of one token for each of ``bs`` sequences of random lengths."""
    old = np.random.default_rng(0).integers(1, 3000, bs, dtype=np.int32)
    last = page_size + (old - 1) % page_size
    allocator = Allocator(600 * bs * page_size, page_size)

    def measure() -> float:
        allocator.reset()
        return per_call(lambda: allocator.alloc_extend(old, old + 1, last), 500)

    return measure


def decode_rows(bs: int = 256) -> float:
    """Write one slot into each of ``bs`` rows, take the updates and index the mirror."""
    pool = ReqToTokenPool(bs, 4096)
    rows, slots = np.arange(bs, dtype=np.int32), np.arange(bs, dtype=np.int32)
    positions = np.random.default_rng(0).integers(1, 3000, bs, dtype=np.int32)

    def step() -> None:
        pool.write_many(rows, positions, slots)
        pool.take_updates().flat_index(4096)

    return per_call(step, 500)


def zero_hits() -> list[Operation]:
    """Prompts that find nothing, or a page and no more, in trees of 100k leaves of other kinds."""
    none, table = ("–", "–", "–"), list[Operation]()
    for page in (1, 16, 64):
        server = with_leaves(100_000, leaf_tokens=max(16, 2 * page), page_size=page)
        if page > 1:
            table.append(Operation(f"… page {page}", 3, none, partial(match_nothing, server)))
        name = f"… page {page}, of which the first is cached"
        table.append(Operation(name, 3, none, partial(match_nothing, server, known=page)))
    server = with_leaves(100_000, namespaces=1000)
    table.append(Operation("… 1,000 namespaces", 3, none, partial(match_nothing, server, f"{7:032x}")))
    return table


def operations(traces: dict[str, Trace], rounds: int) -> list[Operation]:
    none = ("–", "–", "–")
    deep, deep_ids = chain(8192, 100)
    wide = with_leaves(100_000, spare=20 * 8192 * rounds)
    table = [
        Operation("match 8k, one node", 5, ("15", "25", "503"), match_all(*chain(8192, 1), 500)),
        Operation("match 128k, one node", 60, ("197", "338", "8049"), match_all(*chain(131_072, 1), 100)),
        Operation("match 8k, chain of 100 nodes", 60, ("34", "957", "–"), match_all(deep, deep_ids, 200)),
        Operation("slots of a match, 8k, chain of 100", 24, ("24", "26", "–"), lambda: slots_of_match(deep, deep_ids)),
        Operation(
            "lock + unlock, depth 100, path unlocked",
            20,
            ("21", "284", "–"),
            lambda: lock_unlock(deep, deep_ids, locked=False),
        ),
        Operation("… path locked", 1, none, lambda: lock_unlock(deep, deep_ids, locked=True)),
        Operation("insert new 8k among 100k leaves", 40, ("216", "64", "1461"), lambda: insert_new(wide)),
        Operation("zero-hit match 8k", 3, ("9", "7", "4"), lambda: match_nothing(wide)),
        *zero_hits(),
        Operation("evict 10k tokens of 10k leaves, full pool", 2000, ("17000", "20000", "–"), evict_many(10_000)),
        Operation("… of 100k leaves", 2500, ("23000", "67000", "–"), evict_many(100_000)),
        Operation("evict one leaf of 100k", 10, ("4000", "56000", "–"), evict_one),
        Operation("evict 1 token of a leaf of 100k tokens", 100, none, trim_one),
        Operation("alloc 8192 of 500k", 5, ("56", "56", "–"), alloc_or_free("alloc")),
        Operation("free 8192 of 500k", 5, ("2390", "2390", "–"), alloc_or_free("free")),
    ]
    for page in (1, 16):
        table.append(Operation(f"decode of 256: slots, page {page}", 10, none, decode_slots(page)))
    table.append(Operation("decode of 256: rows and their update", 20, none, decode_rows))
    for name, trace in traces.items():
        is_published = (trace.active_jobs, trace.page_size, trace.kv_events) == (128, 1, False)
        peers = ("273", "452", "680–800") if is_published else none
        table.append(Operation(name, 120 if trace.kv_events else 60, peers, trace.measure))
    return table


def show(table: list[Operation]) -> None:
    head = f"{'µs per operation':46} {'ours':>8} {'best':>8} {'goal':>7}   "
    head += f"{'SGLang Rust':>11} {'SGLang Py':>9} {'vLLM':>8}"
    print(head + "\n" + "-" * len(head))
    for op in table:
        ours = median(op.rounds)
        mark = " " if ours <= op.goal else "!"
        rust, python, vllm = op.peers
        line = f"{op.name:46} {ours:8.2f} {min(op.rounds):8.2f} {op.goal:7g} {mark} {rust:>11} {python:>9} {vllm:>8}"
        print(f"{line}  {op.note}".rstrip())
    print("\n!: above the goal. Peers: published for SGLang 0.5.23 and vLLM 0.33 on a 2-core Xeon, not measured here;")
    print("SGLang keeps slots in torch tensors, on a GPU a part of its cost is asynchronous.")


def write_json(table: list[Operation], memory: TreeMemory) -> Path:
    rows = [{k: v for k, v in asdict(op).items() if k != "measure"} | {"median": median(op.rounds)} for op in table]
    report = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load_average": os.getloadavg()[0],
        "operations": rows,
        "tree_mb": asdict(memory),
    }
    out = RESULTS / "radix_ops.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(report, indent=2, ensure_ascii=False))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="run the operations whose name contains this")
    args = parser.parse_args()
    traces = {f"agent trace, per turn, {active} active jobs": Trace(active) for active in (128, 300)}
    traces |= {f"… 128 active jobs, page {page}": Trace(128, page) for page in (16, 64)}
    traces["… 128 active jobs, KV cache events"] = Trace(128, kv_events=True)
    table = [op for op in operations(traces, args.rounds) if args.only in op.name]
    gc.freeze()  # what a server does after start-up: the collector need not visit what stays
    for number in range(args.rounds):
        for op in table if number % 2 == 0 else reversed(table):
            op.rounds.append(op.measure())
    for op in table:
        if trace := traces.get(op.name):
            op.note = f"hit rate {trace.hit_rate:.4f}, {trace.prompt_tokens:.0f} prompt tokens"
    show(table)
    memory = tree_memory()
    print(
        f"a tree of 1 M tokens with nodes of 64 takes {memory.traced:.1f} MB of host memory, and the process grows by "
        f"{memory.resident:.1f} (goal: below 40)"
    )
    out = write_json(table, memory)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; written to {out}")


if __name__ == "__main__":
    main()
