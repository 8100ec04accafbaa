"""Measures the cost of the dashboard: the walk over a large tree, a step during it, pictures, and twenty open pages.

    python -m benchmarks.cache.snapshot_cost [--nodes 100000] [--only walk steps idle picture pages]

    walk      a whole walk over a tree of that many nodes: CPU time, and how long its slices take
    steps     host time per step with and without a watcher, in pairs, the order swapped from pair to pair; the model
              answers at once (see benchmarks/core/host_time.py). Once at full speed, once at 100 steps a second
    idle      the share of a core of an idle worker with a watcher
    picture   in the HTTP process: from the rows of the walk to the bytes of an event
    pages     a whole server on the toy model that answers one request after the other: CPU of its processes without
              pages, and with 20

A share is the CPU time of the thread or process divided by wall time. Prints tables, writes snapshot_cost.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import torch

from baton.entrypoints.http.dashboard.icicle import Span, icicle
from baton.radix.cache import RadixCache
from baton.radix.snapshot import TreeWalk
from baton.runtime.live_reports.reporter import SAVED_S, WalkBudget
from baton.runtime.live_reports.snapshot import SnapshotBuilder
from baton.runtime.messages import TreeRows, WalkEnd, WalkTree, WatchRequests
from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.servers import Server
from benchmarks.core.host_time import VOCAB, Rig, Turns

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
RUNNING, PROMPT = 64, 200
LEAF_TOKENS = 6
STEPS_PER_S = 100
MOST_STEPS = 1600
"""Tokens of a request; the context has no room for more."""

PAGES = 20


def fill(cache: RadixCache, nodes: int, seed: int = 0) -> None:
    """Conversations on 50 shared prompts, until the tree has so many nodes: each turn goes on from the last, or from
    an earlier one."""
    rng = np.random.default_rng(seed)
    shared = [rng.integers(0, VOCAB, 40, dtype=np.int32) for _ in range(50)]
    known = list(shared)
    while cache.total_nodes < nodes:
        before = known[int(rng.integers(len(known)))]
        ids = np.concatenate([before, rng.integers(0, VOCAB, LEAF_TOKENS, dtype=np.int32)])
        row = cache.req_to_token.alloc()
        assert row is not None
        seq = cache.open_sequence("", cache.match_prefix("", ids[:-1]), row)
        old, new = np.array([seq.length], dtype=np.int32), np.array([len(ids)], dtype=np.int32)
        slots = cache.allocator.alloc_extend(old, new, cache.req_to_token.rows[row, max(0, seq.length - 1) :][:1])
        assert slots is not None, "the pool is too small for so many nodes"
        cache.req_to_token.write(row, seq.length, slots)
        seq.length = len(ids)
        cache.cache_finished_req(seq, ids)
        if len(ids) < 300:
            known.append(ids)
    cache.req_to_token.take_updates()


def rig_of(nodes: int) -> Rig:
    """A worker with a free model and a full tree."""
    rig = Rig(RUNNING, 200 + nodes * 10 // 2048, overlap=True)
    fill(rig.scheduler._cache, nodes)
    return rig


# -- the worker --------------------------------------------------------------------------------------------------------


def measure_walk(nodes: int, rounds: int) -> dict[str, Any]:
    rig, took, slices = rig_of(nodes), [], []
    gc.collect()
    gc.freeze()  # a full collection would look at every node; a server has them too, watched or not
    for number in range(rounds):
        walk = TreeWalk(rig.scheduler._cache, with_heads=bool(number % 2))
        is_over, total = False, 0.0
        while not is_over:
            began = time.thread_time()
            is_over = walk.visit_nodes(100)
            slices.append(time.thread_time() - began)
            total += slices[-1]
            walk.take_rows()
        took.append(total)
    rig.close()
    return {
        "nodes": nodes,
        "walk_ms": 1e3 * median(took),
        "node_us": 1e6 * median(took) / nodes,
        "slice_of_100_us": {name: 1e6 * float(np.quantile(slices, q)) for name, q in QUANTILES.items()},
    }


QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


class Steps:
    """A worker with 64 decoding requests."""

    def __init__(self, nodes: int) -> None:
        self.rig = rig_of(nodes)
        rng = np.random.default_rng(1)
        for number in range(RUNNING):
            self.rig.ask(f"r{number}", rng.integers(0, VOCAB, PROMPT), max_new_tokens=MOST_STEPS + 100)
        self.rig.turns(20)
        self.times: dict[bool, list[float]] = {True: [], False: []}
        self.own_s = {True: 0.0, False: 0.0}
        """CPU seconds inside the watcher's part of the turns."""
        self._in_reports_s = 0.0
        reporter = self.rig.loop._live_reports
        report_turn = reporter.report_turn

        def timed(*given: Any) -> None:
            began = time.thread_time()
            report_turn(*given)
            self._in_reports_s += time.thread_time() - began

        reporter.report_turn = timed  # type: ignore[method-assign]

    def run(self, steps: int, *, watched: bool, pace_s: float = 0.0) -> float:
        """CPU seconds of so many turns."""
        total, next_ask = 0.0, 0.0
        reporter = self.rig.loop._live_reports
        if watched:  # the budget saved up without a watcher is spent once per watcher, not in every block
            reporter._budget = WalkBudget()
            reporter._budget.spend(SAVED_S)
        else:
            reporter._walk = None
            self.rig._client.send(WatchRequests(seconds=0.0))
            self.rig.turns(2)
        for _ in range(steps):
            start = time.perf_counter()
            if watched and start >= next_ask:  # as a page's server does
                next_ask = start + 1.0
                self.rig._client.send(WatchRequests(seconds=4.0))
                self.rig._client.send(WalkTree(with_heads=True))
            began, before = time.thread_time(), self._in_reports_s
            self.rig.loop.turn()
            took = time.thread_time() - began
            self.own_s[watched] += self._in_reports_s - before
            total += took
            self.times[watched].append(took)
            if len(self.times[watched]) % 16 == 0:
                self.rig._client_inbox.poll()
            if pace_s:
                time.sleep(max(0.0, pace_s - (time.perf_counter() - start)))
        return total


def measure_steps(nodes: int, pairs: int) -> dict[str, Any]:
    """On one worker, which is watched, and then is not, and so on. own: what the turns spend for the watcher; extra: by
    how much they are longer, whatever the reason, on a machine with other work in a wide interval."""
    result: dict[str, Any] = {}
    block = min(100, MOST_STEPS // (2 * pairs))
    for name, pace_s in (("at full speed", 0.0), ("100 steps a second", 1 / STEPS_PER_S)):
        worker = Steps(nodes)
        sums: dict[bool, list[float]] = {True: [], False: []}
        for number in range(pairs):
            for watched in (True, False) if number % 2 else (False, True):
                sums[watched].append(worker.run(block, watched=watched, pace_s=pace_s))
        extra = [1e6 * (a - b) / block for a, b in zip(sums[True], sums[False])]
        step_s = pace_s or median(sums[False]) / block
        result[name] = {
            "step_us": 1e6 * median(sums[False]) / block,
            "extra_us": {"mean": mean(extra), "median": median(extra), **_interval(extra)},
            "own_us": {str(w): 1e6 * s / len(worker.times[w]) for w, s in worker.own_s.items()},
            "own_share_of_core": worker.own_s[True] / len(worker.times[True]) / step_s,
            "p99_us": {str(w): 1e6 * float(np.quantile(times, 0.99)) for w, times in worker.times.items()},
        }
        worker.rig.close()
    return result


def _interval(values: list[float]) -> dict[str, float]:
    """95 % of the mean, by the bootstrap."""
    rng = np.random.default_rng(0)
    means = rng.choice(values, (2000, len(values))).mean(axis=1)
    return {"low": float(np.quantile(means, 0.025)), "high": float(np.quantile(means, 0.975))}


def measure_idle(nodes: int, seconds: float) -> dict[str, Any]:
    rig = rig_of(nodes)
    shares = {}
    for watched in (False, True):
        end, walks = time.perf_counter() + seconds, 0
        next_ask = 0.0

        def done() -> bool:
            nonlocal next_ask
            now = time.perf_counter()
            if watched and now >= next_ask:  # noqa: B023
                next_ask = now + 1.0
                rig._client.send(WatchRequests(seconds=4.0))
                rig._client.send(WalkTree(with_heads=True))
            return now >= end  # noqa: B023

        began, wall = time.thread_time(), time.perf_counter()
        rig.loop.run(Turns(10**9, done))
        shares["watched" if watched else "alone"] = (time.thread_time() - began) / (time.perf_counter() - wall)
        walks = sum(1 for message in rig._client_inbox.poll() if isinstance(message, TreeRows) and message.end)
        shares["walks"] = walks
    rig.close()
    return shares


# -- the HTTP process --------------------------------------------------------------------------------------------------


def measure_picture(nodes: int, rounds: int) -> dict[str, Any]:
    rig = rig_of(nodes)
    walk = TreeWalk(rig.scheduler._cache, with_heads=True)
    while not walk.visit_nodes(10_000):
        pass
    found = walk.take_rows()
    ticks = np.array([0, rig.scheduler._cache.tick])
    seconds = np.array([0.0, 9.0])
    end = WalkEnd(began=0.0, ended=9.0, complete=True, ticks=ticks.tobytes(), seconds=seconds.tobytes(), ended_at=9.0)
    message = TreeRows(is_first=True, rows=found.rows, heads=found.heads, names=tuple(found.names), end=end)
    rig.close()
    parts: dict[str, list[float]] = {"rows": [], "sums": [], "icicle": [], "JSON": []}
    size = 0
    spans: list[Span] = []

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.thread_time()
        made = call()
        parts[name].append(1e3 * (time.thread_time() - began))
        return made

    for _ in range(rounds):
        snapshot = timed("rows", lambda: SnapshotBuilder().add_rows(message))
        timed("sums", lambda: (snapshot.subtree_tokens, snapshot.uses, snapshot.idle))  # noqa: B023
        spans = timed("icicle", lambda: icicle(snapshot, lambda ids: "text"))  # noqa: B023
        size = len(timed("JSON", lambda: msgspec.json.encode(spans)))  # noqa: B023
    return {"ms": {name: median(values) for name, values in parts.items()}, "bytes": size, "spans": len(spans)}


def measure_pages(seconds: float) -> dict[str, Any]:
    """The server answers one request after the other, so that something changes all the time."""
    server = Server(TOY_MODEL, ["--device", "cpu", "--max-total-tokens", "65536"])
    try:
        processes = {"http": psutil.Process(server._process.pid)}
        for child in processes["http"].children():
            processes["worker" if "worker" in " ".join(child.cmdline()) else "detokenizer"] = child
        stop = threading.Event()
        client = threading.Thread(target=_keep_asking, args=(server.url, stop))
        client.start()
        shares = {}
        for count in (0, 1, PAGES):
            readers = [threading.Thread(target=_read, args=(server.url, seconds + 4)) for _ in range(count)]
            for reader in readers:
                reader.start()
            time.sleep(2)
            before, began = {name: _cpu(p) for name, p in processes.items()}, time.perf_counter()
            time.sleep(seconds)
            wall = time.perf_counter() - began
            shares[f"{count} pages"] = {name: (_cpu(p) - before[name]) / wall for name, p in processes.items()}
            for reader in readers:
                reader.join()
        stop.set()
        client.join()
        return shares
    finally:
        server.close()


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _keep_asking(url: str, stop: threading.Event) -> None:
    number = 0
    with httpx.Client(base_url=url, timeout=60) as client:
        while not stop.is_set():
            number += 1
            sampling = {"max_new_tokens": 30, "ignore_eos": True}
            client.post("/generate", json={"text": f"question {number}", "sampling_params": sampling})
            stop.wait(0.1)


def _read(url: str, seconds: float) -> None:
    end = time.perf_counter() + seconds
    with httpx.Client(base_url=url, timeout=60) as client, client.stream("GET", "/dashboard/events") as response:
        for _ in response.iter_raw():
            if time.perf_counter() >= end:
                return


# -- what is printed ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("walk", "steps", "idle", "picture", "pages")
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--pairs", type=int, default=12, help="of blocks of steps with and without a watcher")
    parser.add_argument("--seconds", type=float, default=12.0, help="of idleness, and of pages that are open")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "walk": lambda: measure_walk(args.nodes, 6),
        "steps": lambda: measure_steps(args.nodes, args.pairs),
        "idle": lambda: measure_idle(args.nodes, args.seconds),
        "picture": lambda: measure_picture(args.nodes, 7),
        "pages": lambda: measure_pages(args.seconds),
    }
    found = {}
    for name in args.only:
        found[name] = measures[name]()
        print(f"{name}:")
        for what, value in found[name].items():
            print(f"  {what}: {_shown(value)}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "snapshot_cost.json").write_text(json.dumps({**about_this_run("cpu"), **found}, indent=1) + "\n")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
