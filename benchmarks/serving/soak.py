"""A long run that detects growth, leaks and starvation: a server on the toy model, with every kind of client at once.

    python -m benchmarks.serving.soak --minutes 60 [--concurrency 32]

Clients stream, hand off, search with beams and tries, abort, read slowly, disconnect, send garbage, and send a token
with NaN weights; the KV pool is far too small for them all (soak_clients.py). Meanwhile a probe requests one token
twice a second. Prints, for each tenth of the run, the memory of each process, open files, threads and the probe's
latency; writes JSON. The exit status is 1 if anything grows, leaks, or fails unexpectedly.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from tqdm import tqdm

from benchmarks.common.measured import RESULTS, about_this_run
from benchmarks.common.nan_model import write_nan_model
from benchmarks.serving.soak_clients import BAD_TOKEN, TRIE_ITEMS, Soak, run_clients

SAMPLE_S = 2.0
WARM_UP = 0.3
"""Share of the run before memory has to be flat: pools are touched and records fill up first."""
MAX_GROWTH = 0.02
MAX_GAP_STEPS = 10
"""From one token of a running stream to its next."""
SPARE_MIB = 4.0
"""Growth that is let pass even where it is more than that share: a process of 60 MiB moves by as much."""


def start_server(folder: Path, args: argparse.Namespace) -> subprocess.Popen:
    np.save(folder / "items.npy", np.array(TRIE_ITEMS, dtype=np.int32))
    command = [sys.executable, "-m", "baton.entrypoints.launch_server"]
    command += ["--model-path", str(write_nan_model(folder, BAD_TOKEN)), "--port", str(args.port)]
    command += ["--max-total-tokens", str(args.max_total_tokens), "--item-trie", f"items={folder / 'items.npy'}"]
    server = subprocess.Popen([*command, "--log-level", "error", "--max-running-requests", "16"])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{args.port}/ready", timeout=5).status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    server.terminate()
    raise SystemExit("the server did not become ready; its log is above")


def measure(server: subprocess.Popen) -> dict[str, float]:
    """MiB of each process, and open files and threads of all."""
    root = psutil.Process(server.pid)
    sample = {"fds": 0.0, "threads": 0.0}
    for process in (root, *root.children(recursive=True)):
        name = "http" if process == root else "worker" if "worker" in " ".join(process.cmdline()) else "detok"
        sample[f"{name} MiB"] = sample.get(f"{name} MiB", 0.0) + process.memory_info().rss / 2**20
        sample["fds"] += process.num_fds()
        sample["threads"] += process.num_threads()
    return sample


async def probe(http: httpx.AsyncClient, samples: list[tuple[float, float]], until: asyncio.Event) -> None:
    """Ask for one token, again and again. samples: (when, seconds)."""
    for number in itertools.count():
        if until.is_set():
            return
        began = time.monotonic()
        body = {"rid": f"probe-{number}", "input_ids": [7, 7, number % 900], "sampling_params": {"max_new_tokens": 1}}
        (await http.post("/generate", json=body)).raise_for_status()
        samples.append((began, time.monotonic() - began))
        await asyncio.sleep(0.5)


async def drive(server: subprocess.Popen, args: argparse.Namespace) -> tuple[Soak, list[dict], list, dict[str, float]]:
    samples: list[dict[str, float]] = []
    latencies: list[tuple[float, float]] = []
    stop, began = asyncio.Event(), time.monotonic()
    limits = httpx.Limits(max_connections=2 * args.concurrency + 8)
    url = f"http://127.0.0.1:{args.port}"
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as http:
        soak = Soak(http, random.Random(args.seed))
        tasks = [asyncio.create_task(run_clients(soak, args.concurrency, stop))]
        tasks.append(asyncio.create_task(probe(http, latencies, stop)))
        with tqdm(total=round(args.minutes * 60), unit="s") as progress:
            while (elapsed := time.monotonic() - began) < args.minutes * 60 and server.poll() is None:
                samples.append({"at": elapsed, **await asyncio.to_thread(measure, server)})
                progress.update(round(elapsed) - progress.n)
                progress.set_postfix(sent=sum(soak.sent.values()), errors=sum(soak.errors.values()))
                await asyncio.sleep(SAMPLE_S)
        stop.set()
        await asyncio.gather(*tasks)
        await asyncio.sleep(6)  # the leases of the last requests expire
        metrics = read_metrics((await http.get("/metrics")).text)
    return soak, samples, [(when - began, seconds) for when, seconds in latencies], metrics


def read_metrics(text: str) -> dict[str, float]:
    wanted = ("leaked_tokens_total", "num_running_reqs", "num_queue_reqs", "leased_tokens", "longest_token_gap_steps",
              "num_steps_total", "num_retractions_total", "leases_handed_off_total", "leases_broken_total",
              "num_nonfinite_total")  # fmt: skip
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ") if "{" not in line else (line.split("{")[0], "", line.rsplit(" ", 1)[1])
        if name.removeprefix("baton:") in wanted:
            found[name.removeprefix("baton:")] = float(value)
    return found


def findings(soak: Soak, samples: list[dict[str, float]], metrics: dict[str, float]) -> list[str]:
    """Everything that is wrong, in words; empty if the run passes."""
    found = [f"{count} × {what}" for what, count in soak.errors.most_common(20)]
    for name in ("leaked_tokens_total", "num_running_reqs", "num_queue_reqs", "leased_tokens"):
        if metrics.get(name, 1.0) != 0:
            found.append(f"{name} is {metrics.get(name)} at the end, not 0")
    if not 1 <= (gap := metrics.get("longest_token_gap_steps", 0)) <= MAX_GAP_STEPS:
        found.append(f"a running stream got no token for {gap:.0f} steps")
    later = [sample for sample in samples if sample["at"] > WARM_UP * samples[-1]["at"]]
    third = max(1, len(later) // 3)
    for name in samples[-1]:
        if name == "at":
            continue
        early, late = (statistics.median(s[name] for s in part) for part in (later[:third], later[-third:]))
        spare = SPARE_MIB if name.endswith("MiB") else 4
        if late - early > max(MAX_GROWTH * early, spare):
            found.append(f"{name} grew from {early:.1f} to {late:.1f} after the first {WARM_UP:.0%} of the run")
    return found


def print_table(samples: list[dict[str, float]], latencies: list[tuple[float, float]]) -> None:
    names = [name for name in samples[0] if name != "at"]
    print(f"{'minute':>8}" + "".join(f"{name:>12}" for name in names) + f"{'probe p50':>12}{'p99 ms':>10}")
    end = samples[-1]["at"]
    for tenth in range(10):
        low, high = end * tenth / 10, end * (tenth + 1) / 10
        part = [sample for sample in samples if low <= sample["at"] <= high]
        took = sorted(seconds * 1e3 for when, seconds in latencies if low <= when < high) or [float("nan")]
        cells = "".join(f"{statistics.median(s[name] for s in part):>12.1f}" for name in names) if part else ""
        print(f"{high / 60:>8.1f}{cells}{took[len(took) // 2]:>12.0f}{took[int(len(took) * 0.99)]:>10.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--port", type=int, default=30999)
    parser.add_argument("--max-total-tokens", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder), args)
        try:
            soak, samples, latencies, metrics = asyncio.run(drive(server, args))
        finally:
            server.terminate()
            server.wait(60)
    print_table(samples, latencies)
    print(f"sent: {dict(soak.sent)}")
    print(f"at the end: {metrics}")
    wrong = findings(soak, samples, metrics)
    report: dict[str, Any] = {**about_this_run("cpu"), "minutes": args.minutes, "sent": soak.sent, "metrics": metrics}
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({**report, "samples": samples, "probe": latencies, "wrong": wrong}, indent=1))
    print("\n".join(["", "wrong:", *wrong]) if wrong else "nothing grew, leaked or failed")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
