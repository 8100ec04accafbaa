"""The frame of every child of a server: it reads its config, ends with its parent and reports why it failed.

server_processes.py starts a child as ``python … <module> RUN_DIR …`` (start_child.py), before any of these exists. Its
standard input is its lifeline: the launcher writes the config there, one line of JSON, and closes it to end the child.
The kernel closes it when the launcher dies, however that happens. The main function of a child is one line:

    if __name__ == "__main__":
        sys.exit(run_child("worker", WorkerProcess, lambda process, stop: run_worker(process.config, ...)))
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import setproctitle

from ...scheduler.constraints.item_trie import ItemTrieError
from ..channels import Endpoints
from ..checkpoint.model_files import ModelLoadError
from ..config import WorkerConfig
from ..job_records import RecordsError
from ..settled_memory import keep_imports
from ..stop_signal import StopSignal
from ..text.tokenizer import TokenizerError

logger = logging.getLogger(__name__)

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a child write the stack of each of its threads to stderr."""

_GRACE_S = 5.0
"""A child that hangs must not outlive its server by more than this."""

_MAX_REASON_BYTES = 4096
"""Bytes that a pipe takes without a reader."""

_OPERATOR_ERRORS = (ModelLoadError, TokenizerError, ItemTrieError, RecordsError)
"""Errors that the operator has to fix: the message is enough, and a stack trace would hide it."""


class ChildProcess(msgspec.Struct, kw_only=True, frozen=True):
    """The config of every child. ``failure_fd``: a child that fails writes its reason there, in one line."""

    endpoints: Endpoints
    parent_pid: int
    failure_fd: int
    log_level: str = "info"


class WorkerProcess(ChildProcess, kw_only=True, frozen=True):
    config: WorkerConfig


class DetokenizerProcess(ChildProcess, kw_only=True, frozen=True):
    tokenizer_path: str


ChildT = TypeVar("ChildT", bound=ChildProcess)


def run_child(role: str, config_type: type[ChildT], run: Callable[[ChildT, StopSignal], None]) -> int:
    """Read the config from standard input and call ``run(config, stop)``; returns the exit status.

    ``stop`` is set when the launcher closes the lifeline, or dies; ``run`` returns soon after. Signals are the
    launcher's: service managers and terminals send them to the whole group, and a child that obeyed would end
    the requests that the launcher lets finish.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    keep_imports()
    line = sys.stdin.buffer.readline()
    if not line:  # the launcher died before it could send the config
        _remove_run_dir()
        return 1
    child = msgspec.json.decode(line, type=config_type)
    stop = StopSignal()
    os.set_inheritable(child.failure_fd, False)
    setproctitle.setproctitle(f"baton::{role}")
    configure_logging(role, child.log_level)
    dump_stacks_on_signal()
    threading.Thread(target=_watch_lifeline, args=(stop, child.parent_pid), name="lifeline", daemon=True).start()
    try:
        run(child, stop)
    except _OPERATOR_ERRORS as error:
        _leave_reason(child.failure_fd, str(error))
        return 1
    except Exception as error:
        logger.exception("%s failed", role)
        _leave_reason(child.failure_fd, f"{type(error).__name__}: {error}")
        return 1
    finally:
        _clean_up_after(child.parent_pid)
    return 0


def dump_stacks_on_signal() -> None:
    """Write the stack of every thread to stderr on `DUMP_SIGNAL`, and after a crash."""
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)


def configure_logging(role: str, level: str) -> None:
    """Log to stderr, with the role of the process in each line."""
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s %(levelname)s {role}: %(message)s", stream=sys.stderr, force=True
    )


def _leave_reason(failure_fd: int, reason: str) -> None:
    os.write(failure_fd, " ".join(reason.split()).encode("utf-8", "replace")[:_MAX_REASON_BYTES])


def _watch_lifeline(stop: StopSignal, parent_pid: int) -> None:
    # Not by sys.stdin: its lock would be held at the interpreter's end.
    while os.read(0, 1024):
        pass
    with contextlib.suppress(Exception):  # a child must not outlive its server because it could not be woken
        stop.set()
    time.sleep(_GRACE_S)
    _clean_up_after(parent_pid)
    os._exit(1)


def _clean_up_after(parent_pid: int) -> None:
    """Remove the run directory if the launcher was killed and could not. Every child does: one of them is the last."""
    if os.getppid() != parent_pid:
        _remove_run_dir()


def _remove_run_dir() -> None:
    for candidate in sys.argv[1:]:
        shutil.rmtree(candidate, ignore_errors=True)
