"""Measures large bodies and answers in the HTTP process: its peak memory, and the slowest `/health` meanwhile.

    python -m benchmarks.serving.large_bodies [--repeat 5] [--cases prompts logprobs]

A server on the toy model, and one large call at a time. Every 3 ms a separate process calls `/health`, and a process
that only echoes: the echo's delay is that of the machine. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from examples.demo import TOY_MODEL, Server

MB = 10**6


def _logprobs(**more: object) -> bytes:
    ids = [[(7 * place + prompt) % 1600 for place in range(2000)] for prompt in range(45)]
    sampling = {"max_new_tokens": 1, "temperature": 0}
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20, "sampling_params": sampling}
    return json.dumps({"input_ids": ids, **fields, **more}).encode()


CASES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "prompt": ("60 MB of text as one prompt", lambda: json.dumps({"text": "word " * (12 * MB)}).encode()),
    "prompts": ("60 MB of text as 16,000 prompts", lambda: json.dumps({"text": ["word " * 750] * 16_000}).encode()),
    "escapes": ("60 MB of escapes as one prompt", lambda: json.dumps({"text": "中" * (10 * MB)}).encode()),
    "texts": ("44 MB, 2 million texts", lambda: json.dumps({"text": ["a b c d e f g h i"] * 1_990_000}).encode()),
    "ids": ("50 MB of token ids, 10 million", lambda: b'{"input_ids":[' + b"1234," * (10 * MB) + b"1]}"),
    "batch": ("10 MB of token ids, 990 prompts", lambda: json.dumps({"input_ids": [[1234] * 2000] * 990}).encode()),
    "objects": ("57 MB of `{}`", lambda: b'{"text":[' + b"{}," * (19 * MB) + b"{}]}"),
    "lists": ("55 MB of `[[]]`", lambda: b'{"text":[' + b"[[]]," * (11 * MB) + b"[]]}"),
    "logprobs": ("an answer with 1.9 million logprobs", _logprobs),
    "logprob texts": ("the same with texts", lambda: _logprobs(return_text_in_logprobs=True)),
}
"""Cases: name -> (description, maker of the body)."""


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    while data := connection.recv(64):
        connection.sendall(data)


def _probe(port: int, echo: tuple[str, int], pipe: Connection) -> None:
    """Sends the slowest answers since it was last asked, in seconds: of `/health`, and of the echo."""
    health, control = socket.create_connection(("127.0.0.1", port)), socket.create_connection(echo)
    for each in (health, control):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    slowest = [0.0, 0.0]
    while True:
        if pipe.poll(0.003):
            pipe.recv()
            pipe.send(slowest)
            slowest = [0.0, 0.0]
        times = [time.perf_counter()]
        health.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while not health.recv(4096).endswith(b"}"):
            pass
        times.append(time.perf_counter())
        control.sendall(b"x")
        control.recv(64)
        times.append(time.perf_counter())
        slowest = [max(slowest[0], times[1] - times[0]), max(slowest[1], times[2] - times[1])]


def _post(port: int, body: bytes) -> str:
    """The answer's status; the rest is read and dropped."""
    head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=600) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        connection.sendall(body)
        first = connection.recv(2**18)
        while connection.recv(2**18):
            pass
    return first.split()[1].decode()


def _peak_mib(pid: int) -> float:
    """The largest resident memory since this was last called."""
    status = Path(f"/proc/{pid}/status").read_text()
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def measure(server: Server, cases: list[str], repeat: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    mine, theirs = multiprocessing.Pipe()
    helpers = [
        multiprocessing.Process(target=_echo, args=(listener,), daemon=True),
        multiprocessing.Process(target=_probe, args=(server.port, listener.getsockname(), theirs), daemon=True),
    ]
    for helper in helpers:
        helper.start()

    def run(what: str, work: Callable[[], str]) -> None:
        peaks, waits, echoes, status = [], [], [], ""
        for _ in range(repeat):
            _peak_mib(server.pid)
            mine.send(None)
            mine.recv()
            status = work()
            time.sleep(0.3)
            mine.send(None)
            health, echo = mine.recv()
            peaks.append(_peak_mib(server.pid))
            waits.append(health * 1e3)
            echoes.append(echo * 1e3)
        median, most = statistics.median(waits), max(waits)
        print(f"| {what}: {status} | {max(peaks):.0f} | {median:.0f} | {most:.0f} | {max(echoes):.0f} |", flush=True)

    print("| what | peak, MiB | `/health`, median of the slowest, ms | slowest | echo |\n|---|---|---|---|---|")
    run("nothing, for 3 s", lambda: time.sleep(3) or "-")
    for case in cases:
        what, make = CASES[case]
        body = make()
        run(what, lambda body=body: _post(server.port, body))
    for helper in helpers:
        helper.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(TOY_MODEL, Path(folder) / "log")
        try:
            server.wait_until_ready()
            measure(server, args.cases, args.repeat)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
