"""Loads each server with the same client: a closed loop of streams on OpenAI's completions, on token ids."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common.raw_http import Connections
from benchmarks.peers.driver import EngineFailed, Process, wait_until
from benchmarks.peers.engines import LARGE, Engine, Room
from benchmarks.peers.work import Found, Ids, Prompts

PATH = "/v1/completions"
END_S = 15.0


@dataclass
class Stream:
    """Seconds of one request: to its first event with text, and between the events after it."""

    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    """As the server counts them."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """rate, times: the names of the metrics, the latter by what they are; rate is empty if the load is not the figure.
    Every client sends its next prompt as soon as it has the whole answer to the last."""

    rate: str
    times: dict[str, str]
    clients: int
    requests: int
    prompt: int
    tokens: int

    def __call__(self, url: str, prompts: Prompts, limit_s: float) -> Found:
        made = prompts.make(prompts.rng(), self.clients + self.requests, self.prompt)
        try:
            seconds, streams = asyncio.run(asyncio.wait_for(self._all(url, made), limit_s))
        except TimeoutError:
            raise EngineFailed(f"the requests were not done within {limit_s:.0f} s") from None
        except (OSError, RuntimeError, EOFError) as error:
            raise EngineFailed(f"{type(error).__name__}: {error}") from None
        counts = {stream.tokens for stream in streams}
        if counts != {self.tokens}:
            raise EngineFailed(f"answers of {sorted(counts)} tokens, where {self.tokens} were wanted")
        if not self.rate:
            return Found({})
        gaps = [gap for stream in streams for gap in stream.gaps]
        if not gaps:
            raise EngineFailed("every answer came as a whole: there is nothing between its tokens")
        values = {"TTFT": [stream.ttft for stream in streams], "ITL": gaps}
        figures = {self.rate: len(streams) / seconds}
        for what, name in self.times.items():
            kind, percentile = what.split(" p")
            figures[name] = float(np.percentile(values[kind], int(percentile))) * 1e3
        return Found(figures, extra={"events_per_request": 1 + len(gaps) / len(streams)})

    async def _all(self, url: str, prompts: list[Ids]) -> tuple[float, list[Stream]]:
        connections = Connections(url, kept=bool(self.rate))
        try:
            await asyncio.gather(*(self._one(connections, ids) for ids in prompts[: self.clients]))
            waiting, done = iter(prompts[self.clients :]), []

            async def client() -> None:
                for ids in waiting:
                    done.append(await self._one(connections, ids))

            began = time.perf_counter()
            await asyncio.gather(*(client() for _ in range(self.clients)))
            return time.perf_counter() - began, done
        finally:
            connections.close()

    async def _one(self, connections: Connections, ids: Ids) -> Stream:
        body: dict[str, Any] = {"model": "model", "prompt": ids, "max_tokens": self.tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        began, arrivals, tokens = time.perf_counter(), [], 0
        async for data in connections.events(PATH, body):
            now = time.perf_counter()
            event = msgspec.json.decode(data)
            if "error" in event:
                raise RuntimeError(f"{PATH}: {event['error']}")
            if event["choices"]:
                arrivals.append(now)
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
        if not arrivals:
            raise RuntimeError(f"{PATH}: a stream without an event")
        return Stream(arrivals[0] - began, [b - a for a, b in itertools.pairwise(arrivals)], tokens)


@contextlib.contextmanager
def serving(
    engine: Engine,
    model: Path,
    dtype: str,
    cores: list[int],
    work: Path,
    log: Path,
    start_s: float,
    room: Room = LARGE,
) -> Iterator[tuple[str, Process]]:
    """The URL of a server that is ready. Raises EngineFailed if it does not become so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = Process(engine.server(model, dtype, port, room), engine.environment(cores, work), log, asked=False)

    def settled() -> bool:
        return process.popen.poll() is not None or answers(port, engine.ready_path)

    try:
        if not wait_until(settled, start_s):
            raise process.failed(f"the server was not ready within {start_s:.0f} s")
        if process.popen.poll() is not None:
            raise process.failed(f"the server ended with status {process.popen.returncode}")
        yield url, process
    finally:
        process.end(END_S)


def answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
