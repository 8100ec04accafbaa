"""The frame of every child of a server: it reads its config, ends with its parent and reports why it failed.

server_processes.py starts a child as ``python -m <module> CONFIG.json``. Its main function is one line:

    if __name__ == "__main__":
        sys.exit(run_child("worker", WorkerProcess, lambda process, stop: run_worker(process.config, ...)))
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import setproctitle

from ...scheduler.constraints.item_trie import ItemTrieError
from ..channels import Endpoints
from ..checkpoint.model_files import ModelLoadError
from ..config import WorkerConfig
from ..text.tokenizer import TokenizerError

logger = logging.getLogger(__name__)

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a child write the stack of each of its threads to stderr."""

_PARENT_CHECK_S = 1.0
_ORPHAN_GRACE_S = 5.0


_OPERATOR_ERRORS = (ModelLoadError, TokenizerError, ItemTrieError)
"""Errors that the operator has to fix: the message is enough, and a stack trace would hide it."""


class ChildProcess(msgspec.Struct, kw_only=True, frozen=True):
    """The config of every child. ``failure_file``: if the child fails, it writes one line there to say why."""

    endpoints: Endpoints
    parent_pid: int
    failure_file: str
    log_level: str = "info"


class WorkerProcess(ChildProcess, kw_only=True, frozen=True):
    config: WorkerConfig


class DetokenizerProcess(ChildProcess, kw_only=True, frozen=True):
    tokenizer_path: str


ChildT = TypeVar("ChildT", bound=ChildProcess)


def run_child(role: str, config_type: type[ChildT], run: Callable[[ChildT, threading.Event], None]) -> int:
    """Read the config named on the command line and call ``run(config, stop)``; returns the exit status.

    ``stop`` is set by SIGTERM and by the death of the parent; ``run`` returns soon after. SIGINT is left to the parent:
    a terminal sends it to the whole group.
    """
    child = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=config_type)
    stop = threading.Event()
    setproctitle.setproctitle(f"baton::{role}")
    configure_logging(role, child.log_level)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    _end_with_parent(child.parent_pid, stop)
    try:
        run(child, stop)
    except _OPERATOR_ERRORS as error:
        _leave_reason(child.failure_file, str(error))
        return 1
    except Exception as error:
        logger.exception("%s failed", role)
        _leave_reason(child.failure_file, f"{type(error).__name__}: {error}")
        return 1
    finally:
        if os.getppid() != child.parent_pid:
            # The parent was killed and could not clean up.
            shutil.rmtree(Path(child.failure_file).parent, ignore_errors=True)
    return 0


def configure_logging(role: str, level: str) -> None:
    """Log to stderr, with the role of the process in each line."""
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s %(levelname)s {role}: %(message)s", stream=sys.stderr, force=True
    )


def _leave_reason(failure_file: str, reason: str) -> None:
    Path(failure_file).write_text(" ".join(reason.split()), encoding="utf-8")


def _end_with_parent(parent_pid: int, stop: threading.Event) -> None:
    """Set ``stop`` when the parent dies: by the kernel's signal, and by polling the parent's id where there is none."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_CHECK_S)
        stop.set()
        time.sleep(_ORPHAN_GRACE_S)  # a child that hangs must not outlive its server
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
