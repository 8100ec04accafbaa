"""Starts a server's child processes, reports when and why one ends, and stops them. Leaves nothing behind.

Plain subprocesses, not multiprocessing: a child gets its config as a line of JSON and everything else as messages;
nothing is pickled or forked. The sockets live in a directory, mode 0700, that is removed as soon as every process is
connected: what is not there cannot be left behind.
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

import msgspec

from ..channels import Endpoints, make_run_dir, run_dir_candidates
from ..config import WorkerConfig
from .child_process import DUMP_SIGNAL, DetokenizerProcess, WorkerProcess

logger = logging.getLogger(__name__)

_START = ("-m", "baton.runtime.launcher.start_child")
WORKER_MODULE = (*_START, "baton.runtime.worker")
DETOKENIZER_MODULE = (*_START, "baton.runtime.detokenizer")

_DUMP_S = 1.0
"""Seconds that a hung child has to write its stacks."""


@dataclass(slots=True, frozen=True)
class ChildExit:
    """A child that ended. ``reason``: the child's own message, else its last signal or exit status."""

    role: str
    reason: str

    def __str__(self) -> str:
        return f"the {self.role} ended: {self.reason}"


@dataclass(slots=True)
class _Child:
    """failure_fd: the read end of a pipe; the child writes there why it failed. childs_fd: the number of the other end
    in the child."""

    role: str
    process: asyncio.subprocess.Process
    failure_fd: int
    childs_fd: int


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
        self._run_dirs = run_dir_candidates()
        self._config = config
        self._tokenizer_path = tokenizer_path
        self._worker_command = worker_command
        self._children: list[_Child] = []

    async def spawn_worker(self) -> None:
        """Start the worker, before all else: it takes seconds to import torch, and then waits for its config."""
        await self._spawn("worker", self._worker_command)

    async def start(self) -> Endpoints:
        """Start the detokenizer, send the configs and return the endpoints at once. The worker sends `WorkerReady` when
        it can serve.

        The directory is made after the children: they remove it if this process is killed.
        """
        await self._spawn("detokenizer", DETOKENIZER_MODULE)
        worker_fd, detokenizer_fd = (child.childs_fd for child in self._children)
        endpoints = Endpoints.for_processes(make_run_dir(self._run_dirs))
        detokenizer = DetokenizerProcess(
            endpoints=endpoints,
            parent_pid=os.getpid(),
            failure_fd=detokenizer_fd,
            log_level=self._config.log_level,
            tokenizer_path=self._tokenizer_path,
        )
        worker = WorkerProcess(
            endpoints=endpoints,
            parent_pid=os.getpid(),
            failure_fd=worker_fd,
            log_level=self._config.log_level,
            config=self._config,
        )
        for child, config in zip(self._children, (worker, detokenizer), strict=True):
            _stdin(child.process).write(msgspec.json.encode(config) + b"\n")
        return endpoints

    def all_connected(self) -> None:
        """Remove the directory of the sockets: connections outlive their names. Call it once a message has passed
        through all processes."""
        for candidate in self._run_dirs:
            shutil.rmtree(candidate, ignore_errors=True)

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
        """End all children: close their lifelines, then SIGKILL after ``grace_s`` seconds; remove the directory."""
        alive = [child.process for child in self._children if child.process.returncode is None]
        for process in alive:
            _stdin(process).close()
        if alive:
            waits = asyncio.gather(*(process.wait() for process in alive))
            try:
                await asyncio.wait_for(waits, grace_s)
            except TimeoutError:
                for process in alive:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                await asyncio.gather(*(process.wait() for process in alive))
        for child in self._children:
            os.close(child.failure_fd)
        self._children.clear()
        self.all_connected()

    async def _spawn(self, role: str, command: Sequence[str]) -> None:
        failure_fd, childs_end = os.pipe()
        os.set_blocking(failure_fd, False)
        try:
            # -P: a folder in the user's directory must not shadow a dependency of the same name.
            # A session of its own: a signal to the launcher's process group must not end a child that still loads.
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", *command, *map(str, self._run_dirs),
                stdin=asyncio.subprocess.PIPE, pass_fds=(childs_end,), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(failure_fd)
            raise
        finally:
            os.close(childs_end)
        self._children.append(_Child(role, process, failure_fd, childs_end))
        logger.debug("started the %s, process %d", role, process.pid)


def _stdin(process: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    assert process.stdin is not None
    return process.stdin


def _describe(child: _Child) -> ChildExit:
    # A process of the child's own may still hold the pipe, empty or not.
    with contextlib.suppress(BlockingIOError):
        if reason := os.read(child.failure_fd, 65536):
            return ChildExit(child.role, reason.decode("utf-8", "replace"))
    status = child.process.returncode
    assert status is not None
    if status >= 0:
        return ChildExit(child.role, f"exit status {status}; its log above may say why")
    name = signal.Signals(-status).name
    hint = " (often the kernel's answer to too little memory)" if name == "SIGKILL" else ""
    return ChildExit(child.role, f"killed by {name}{hint}")
