"""Does memory stay flat? A server on the toy model, many requests of every kind, resident memory of each process.

    python -m benchmarks.serving.soak [--requests 10000] [--concurrency 32]

Prompts share prefixes, some stream, some are cut off by the client, some continue an earlier one. Prints a table with
one row per tenth of the run, and the growth from the first fifth (pools touched, records full) to the end; writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
from tqdm import tqdm

from benchmarks.common.measured import RESULTS
from benchmarks.common.models import TOY_MODEL


def start_server(port: int, tokens: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "baton.entrypoints.launch_server", "--model-path", str(TOY_MODEL)]
    flags = ["--port", str(port), "--max-total-tokens", str(tokens), "--log-level", "warning"]
    server = subprocess.Popen([*command, *flags])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    server.terminate()
    raise SystemExit("the server did not become ready; its log is above")


def resident_mib(server: subprocess.Popen) -> dict[str, float]:
    """MiB by process."""
    root = psutil.Process(server.pid)
    found = {"http": root.memory_info().rss}
    for child in root.children(recursive=True):
        name = "worker" if "baton.runtime.worker" in " ".join(child.cmdline()) or "worker" in child.name() else "detok"
        found[name] = found.get(name, 0) + child.memory_info().rss
    return {name: size / 2**20 for name, size in found.items()}


def make_body(rng: random.Random, number: int) -> dict:
    body: dict = {
        "input_ids": [rng.randrange(3)] * rng.randrange(1, 60)
        + [rng.randrange(1000) for _ in range(rng.randrange(40))],
        "sampling_params": {"max_new_tokens": rng.randrange(1, 24), "temperature": rng.choice([0, 0.8]), "n": 1},
        "rid": f"soak-{number}",
        "stream": rng.random() < 0.3,
    }
    body["input_ids"] += [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
    if rng.random() < 0.2:
        body["retain_ttl"] = 1.0
    if rng.random() < 0.1:
        body["return_logprob"] = True
    if rng.random() < 0.1:
        body["sampling_params"]["stop"] = ["the", "```"]
    if number > 50 and rng.random() < 0.2:
        body["continuation_of"] = f"soak-{number - rng.randrange(20, 50)}"
        body["continuation_ids"] = [rng.randrange(1000)]
    return body


async def send(client: httpx.AsyncClient, body: dict, cut_off: bool) -> int:
    if not body["stream"]:
        return (await client.post("/generate", json=body)).status_code
    async with client.stream("POST", "/generate", json=body) as answer:
        async for _ in answer.aiter_lines():
            if cut_off:
                break
    return answer.status_code


async def drive(port: int, server: subprocess.Popen, args: argparse.Namespace) -> tuple[list[dict], dict[int, int]]:
    rng = random.Random(args.seed)
    rows: list[dict] = []
    statuses: dict[int, int] = {}
    numbers = iter(range(args.requests))
    progress = tqdm(total=args.requests, unit="request")
    limits = httpx.Limits(max_connections=args.concurrency)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=120) as client:

        async def worker() -> None:
            for number in numbers:
                status = await send(client, make_body(rng, number), cut_off=rng.random() < 0.2)
                statuses[status] = statuses.get(status, 0) + 1
                progress.update()
                if progress.n % (args.requests // 10) == 0:
                    rows.append({"requests": progress.n, **resident_mib(server)})

        await asyncio.gather(*(worker() for _ in range(args.concurrency)))
    progress.close()
    return rows, statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--port", type=int, default=30999)
    parser.add_argument("--max-total-tokens", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json")
    args = parser.parse_args()
    server = start_server(args.port, args.max_total_tokens)
    start = time.monotonic()
    try:
        rows, statuses = asyncio.run(drive(args.port, server, args))
        seconds = time.monotonic() - start
    finally:
        server.terminate()
        server.wait(60)
    names = [name for name in rows[0] if name != "requests"]
    print(f"{'requests':>10}" + "".join(f"{name + ' MiB':>14}" for name in names))
    for row in rows:
        print(f"{row['requests']:>10}" + "".join(f"{row[name]:>14.1f}" for name in names))
    growth = {name: rows[-1][name] - rows[1][name] for name in names}
    print(f"{'growth':>10}" + "".join(f"{growth[name]:>14.1f}" for name in names))
    print(f"{args.requests} requests in {seconds:.0f} s; answers by status: {dict(sorted(statuses.items()))}")
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"rows": rows, "statuses": statuses, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
