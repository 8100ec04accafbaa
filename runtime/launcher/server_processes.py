"""Starts a server's child processes, reports when and why one ends, and stops them. Leaves nothing behind.

Plain subprocesses, not multiprocessing: a child gets its config as a JSON file and everything else as messages; nothing
is pickled or forked. A server's files (configs, sockets, failure reasons) live in one directory, mode 0700, that is
removed when it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..channels import Endpoints, make_run_dir
from ..config import WorkerConfig
from .child_process import DUMP_SIGNAL, ChildProcess, DetokenizerProcess, WorkerProcess

logger = logging.getLogger(__name__)

WORKER_MODULE = ("-m", "baton.runtime.worker")
DETOKENIZER_MODULE = ("-m", "baton.runtime.detokenizer")

_DUMP_S = 1.0
"""How long a hung child gets to write its stacks."""


@dataclass(slots=True, frozen=True)
class ChildExit:
    """A child that ended. ``reason``: what the child said, else its last signal or exit status."""

    role: str
    reason: str

    def __str__(self) -> str:
        return f"the {self.role} ended: {self.reason}"


@dataclass(slots=True)
class _Child:
    role: str
    process: asyncio.subprocess.Process
    failure_file: Path


class ServerProcesses:
    """The worker and the detokenizer of one server. Used from one asyncio loop, in the main thread.

    worker_command: what follows ``python`` on the worker's command line; tests put a stand-in there.
    """

    def __init__(
        self,
        config: WorkerConfig,
        tokenizer_path: str,
        *,
        worker_command: Sequence[str] = WORKER_MODULE,
    ) -> None:
        self.run_dir = make_run_dir()
        self.endpoints = Endpoints.for_processes(self.run_dir)
        self._config = config
        self._tokenizer_path = tokenizer_path
        self._worker_command = worker_command
        self._children: list[_Child] = []

    async def start(self) -> None:
        """Start both; returns at once. The worker says by a `WorkerReady` message when it can serve."""
        common = {"endpoints": self.endpoints, "parent_pid": os.getpid(), "log_level": self._config.log_level}
        detokenizer = DetokenizerProcess(
            **common, failure_file=str(self._failure_file("detokenizer")), tokenizer_path=self._tokenizer_path
        )
        worker = WorkerProcess(**common, failure_file=str(self._failure_file("worker")), config=self._config)
        await self._spawn("detokenizer", DETOKENIZER_MODULE, detokenizer)
        await self._spawn("worker", self._worker_command, worker)

    async def first_exit(self) -> ChildExit:
        """Wait until a child ends, whatever its exit status: none ever should."""
        waits = [asyncio.ensure_future(child.process.wait()) for child in self._children]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return next(_describe(child) for child in self._children if child.process.returncode is not None)

    async def dump(self) -> None:
        """Make the children write the stacks of their threads to stderr, because one of them hangs."""
        for child in self._children:
            if child.process.returncode is None:
                child.process.send_signal(DUMP_SIGNAL)
        await asyncio.sleep(_DUMP_S)

    async def stop(self, grace_s: float = 5.0) -> None:
        """End all children: SIGTERM, then SIGKILL after ``grace_s`` seconds; then remove the directory."""
        alive = [child.process for child in self._children if child.process.returncode is None]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        if alive:
            waits = asyncio.gather(*(process.wait() for process in alive))
            try:
                await asyncio.wait_for(waits, grace_s)
            except TimeoutError:
                for process in alive:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                await asyncio.gather(*(process.wait() for process in alive))
        shutil.rmtree(self.run_dir, ignore_errors=True)

    async def _spawn(self, role: str, command: Sequence[str], config: ChildProcess) -> None:
        path = self.run_dir / f"{role}.json"
        path.write_bytes(msgspec.json.encode(config))
        # -P: a folder in the user's directory must not shadow a dependency of the same name.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", *command, str(path), stdin=asyncio.subprocess.DEVNULL
        )
        self._children.append(_Child(role, process, self._failure_file(role)))
        logger.debug("started the %s, process %d", role, process.pid)

    def _failure_file(self, role: str) -> Path:
        return self.run_dir / f"{role}.failure"


def _describe(child: _Child) -> ChildExit:
    with contextlib.suppress(OSError):
        return ChildExit(child.role, child.failure_file.read_text(encoding="utf-8"))
    status = child.process.returncode
    assert status is not None
    if status >= 0:
        return ChildExit(child.role, f"exit status {status}; its log above may say why")
    name = signal.Signals(-status).name
    hint = " (often the kernel's answer to too little memory)" if name == "SIGKILL" else ""
    return ChildExit(child.role, f"killed by {name}{hint}")
