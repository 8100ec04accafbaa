"""Measures an item trie: reading and building it, its size, sending it to the worker, and a step of a beam search.

    python -m benchmarks.core.item_trie [--items 1000000] [--levels 3] [--codes 8192] [--width 32] [--rounds 5]

No model. Random items, every level with its own codes, like semantic ids. A step of a search makes the calls of
scheduler/beam/search.py: the children of every live beam once, then for its candidates (two per beam) one `advance` and
`is_leaf`, and one more `advance` for the chosen ones. The last line is the worst case: every beam at a node that has
all codes below it. Times are medians over the rounds. Writes benchmarks/results/item_trie.json. One thread.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import platform
import time
from collections.abc import Callable
from statistics import median

import msgspec
import numpy as np

from baton.entrypoints.fields.item_trie_source import build_item_trie
from baton.runtime.constraints.item_tries import ItemTries, pack_trie, read_item_trie, unpack_trie
from baton.runtime.messages import LoadItemTrie
from baton.scheduler.constraints.item_trie import ItemTrie
from benchmarks.common.measured import RESULTS

CANDIDATES_PER_BEAM = 2
CALLS = 200


def make_items(num_items: int, levels: int, codes: int) -> np.ndarray:
    """int32 [num_items, levels], distinct."""
    rng = np.random.default_rng(0)
    items = np.empty((0, levels), dtype=np.int32)
    while len(items) < num_items:
        more = rng.integers(0, codes, (num_items, levels), dtype=np.int32) + np.arange(levels, dtype=np.int32) * codes
        items = np.unique(np.concatenate([items, more]), axis=0)
    return rng.permutation(items)[:num_items]


def npy(items: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, items)
    return file.getvalue()


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def per_call_us(run: Callable[[], object]) -> float:
    run()
    begin = time.perf_counter()
    for _ in range(CALLS):
        run()
    return (time.perf_counter() - begin) / CALLS * 1e6


def worst_gap(data: bytes) -> float:
    """Seconds for which a loop that has something to do every millisecond is held up, at worst, while it takes an
    upload: built in a thread, packed and encoded on the loop, as the server does it."""

    async def upload() -> float:
        worst, last, done = 0.0, time.perf_counter(), False

        async def tick() -> None:
            nonlocal worst, last
            while not done:
                await asyncio.sleep(0.001)
                worst, last = max(worst, time.perf_counter() - last), time.perf_counter()

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0.05)
        worst = 0.0
        trie = await build_item_trie(data)
        msgspec.msgpack.encode(pack_trie(0, "items", trie))
        await asyncio.sleep(0)
        done = True
        await ticking
        return worst

    return asyncio.run(upload())


def take(frame: bytes, tries: ItemTries) -> None:
    """Take an upload as the worker does."""
    message = msgspec.msgpack.decode(frame, type=LoadItemTrie)
    tries.put(message.name, unpack_trie(message))


def random_path(trie: ItemTrie, width: int, depth: int) -> np.ndarray:
    """int32 [width]: nodes of a depth, each reached by random steps."""
    rng = np.random.default_rng(depth)
    nodes = np.zeros(width, dtype=np.int32)
    for _ in range(depth):
        offset = rng.random(width) * trie.num_children(nodes)
        first = np.concatenate([[0], np.cumsum(trie.num_children(nodes))[:-1]])
        nodes = trie.advance(nodes, trie.children(nodes)[1][first + offset.astype(np.int32)])
    return np.unique(nodes)


def step_costs(trie: ItemTrie, nodes: np.ndarray, width: int) -> dict[str, float]:
    """Time in µs of a step of a search with live beams at ``nodes``."""
    index, tokens = trie.children(nodes)
    chosen = np.random.default_rng(1).permutation(len(index))[: CANDIDATES_PER_BEAM * width]
    from_nodes, by_tokens = nodes[index[chosen]], tokens[chosen]
    kept = slice(0, width)
    costs = {
        "children": per_call_us(lambda: trie.children(nodes)),
        "candidates": per_call_us(lambda: trie.is_leaf(trie.advance(from_nodes, by_tokens))),
        "kept": per_call_us(lambda: trie.advance(from_nodes[kept], by_tokens[kept])),
    }
    return {"beams": len(nodes), "continuations": len(index), **costs, "step": sum(costs.values())}


def measure_loading(data: bytes, trie: ItemTrie, rounds: int, vocab_size: int) -> dict[str, list[float]]:
    """Seconds of every round, by what is done with the file ``data`` or the trie made of it."""
    frame = msgspec.msgpack.encode(pack_trie(0, "items", trie))
    tries = ItemTries(vocab_size)
    return {
        "read and build, s": [seconds(lambda: read_item_trie(data)) for _ in range(rounds)],
        "HTTP loop held up at worst, s": [worst_gap(data) for _ in range(rounds)],
        "worker takes it, s": [seconds(lambda: take(frame, tries)) for _ in range(rounds)],
    }


def measure_steps(trie: ItemTrie, levels: int, codes: int, width: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of `step_costs` for every step of a search, and for the worst that a step can be."""
    fan = np.arange(codes, dtype=np.int32)
    wide = ItemTrie.build(np.stack([np.repeat(np.arange(width), codes), np.tile(fan, width)], axis=1))
    places = {f"step {depth + 1}": (trie, random_path(trie, width, depth)) for depth in range(levels)}
    places["all codes below every beam"] = (wide, np.arange(1, width + 1, dtype=np.int32))
    measured = {name: [step_costs(*place, width) for _ in range(rounds)] for name, place in places.items()}
    return {name: {key: median(row[key] for row in rows) for key in rows[0]} for name, rows in measured.items()}


def print_tables(loading: dict[str, list[float]], steps: dict[str, dict[str, float]]) -> None:
    for name, values in loading.items():
        print(f"{name:32} {median(values):8.3f}   best {min(values):.3f}")
    head = f"\n{'µs per step of a search':30} {'beams':>6} {'ways on':>8} {'children':>9} {'candidates':>10}"
    print(head + f" {'kept':>7} {'together':>9}")
    for name, row in steps.items():
        line = f"{name:30} {row['beams']:6.0f} {row['continuations']:8.0f} {row['children']:9.1f}"
        print(line + f" {row['candidates']:10.1f} {row['kept']:7.1f} {row['step']:9.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("items", 1_000_000), ("levels", 3), ("codes", 8192), ("width", 32), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    data = npy(make_items(args.items, args.levels, args.codes))
    trie = read_item_trie(data)
    loading = measure_loading(data, trie, args.rounds, args.levels * args.codes)
    steps = measure_steps(trie, args.levels, args.codes, args.width, args.rounds)
    print(f"{args.items:,} items of {args.levels} tokens, {args.codes} codes per level; file {len(data) / 1e6:.1f} MB")
    print(f"trie: {trie.num_nodes:,} nodes, {trie.num_bytes / 1e6:.1f} MB")
    print_tables(loading, steps)
    report = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load_average": os.getloadavg()[0],
        "arguments": vars(args),
        "nodes": trie.num_nodes,
        "bytes": trie.num_bytes,
        "loading": loading,
        "steps_us": steps,
    }
    out = RESULTS / "item_trie.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(report, indent=2, ensure_ascii=False))
    print(f"\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; written to {out}")


if __name__ == "__main__":
    main()
