"""The servers of a run. Those that are measured in the same scenario run together and take turns."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from benchmarks.hybrids.chat import Completions
from benchmarks.hybrids.engines import Contender
from benchmarks.peers.driver import EngineFailed
from benchmarks.peers.http_load import serving

START_S, LIMIT_S = 900.0, 300.0
END_S = 30.0


class ChatServer:
    """The server of one engine, ready; closed with `close`. Raises EngineFailed if it does not become ready."""

    def __init__(self, engine: Contender, model: Path, work: Path) -> None:
        self.engine = engine
        self._model, self._work = model, work
        self._open = contextlib.ExitStack()
        self._start()

    def _start(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        log = self._work / "logs" / f"{self.engine.name}.log"
        url, self._process = self._open.enter_context(
            serving(self.engine, self._model, "float32", cores, self._work, log, START_S)
        )
        client = Completions(url, self._model / "tokenizer.json", LIMIT_S)
        self.completions = self._open.enter_context(contextlib.closing(client))

    def restart(self) -> None:
        """Stop the server by SIGTERM, and start another one. What it has on disk stays."""
        self.engine.before_stop(self.completions)
        self._process.popen.terminate()
        self._process.popen.wait(END_S)
        self._open.close()
        self._start()
        self.engine.after_start(self.completions)

    def close(self) -> None:
        self._open.close()


def start_servers(
    engines: list[Contender], model: Path, work: Path, skipped: dict[str, str], stack: contextlib.ExitStack
) -> list[ChatServer]:
    """Start the servers of these engines, and return those that are ready. skipped: gets, by name, why the others are
    not."""
    found: list[ChatServer] = []
    for engine in engines:
        if why := engine.missing():
            skipped[engine.name] = why
            continue
        try:
            found.append(stack.enter_context(contextlib.closing(ChatServer(engine, model, work))))
        except EngineFailed as failure:
            skipped[engine.name] = "\n".join([failure.reason, *failure.last_lines])
    return found
