"""The client's side of an engine in its own process, under its own python; drivers/serve.py describes the protocol."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LAST_LINES = 12


class EngineFailed(Exception):
    """An engine answered with an error, ended, or did not answer in time. last_lines: of what it wrote to stderr."""

    def __init__(self, reason: str, last_lines: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.reason, self.last_lines = reason, list(last_lines)


class Process:
    """A command in a process group of its own, which goes as a whole; its stderr is a file.

    Raises EngineFailed if there is no such program.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, asked: bool) -> None:
        """asked: it reads questions and writes answers; else its stdout goes where its stderr goes."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        pipe = subprocess.PIPE if asked else None
        with log.open("w") as errors:
            try:
                self.popen = subprocess.Popen(
                    list(command),
                    stdin=pipe or subprocess.DEVNULL,
                    stdout=pipe or errors,
                    stderr=errors,
                    env={**os.environ, **environment},
                    text=True,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineFailed(f"{command[0]}: {error.strerror}") from None

    def memory(self) -> dict[str, float]:
        """MB that the process and all its descendants hold: "now" and "peak" resident, "proportional" with shared pages
        counted once. The peak is the sum of theirs, which need not be of one moment."""
        found = {"now": 0.0, "peak": 0.0, "proportional": 0.0}
        for pid in descendants(self.popen.pid):
            with contextlib.suppress(OSError, KeyError):  # it may end meanwhile
                status = sizes_mb(Path(f"/proc/{pid}/status"))
                found["now"] += status["VmRSS"]
                found["peak"] += status["VmHWM"]
                found["proportional"] += sizes_mb(Path(f"/proc/{pid}/smaps_rollup"))["Pss"]
        return found

    def failed(self, reason: str) -> EngineFailed:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return EngineFailed(reason, lines[-LAST_LINES:])

    def end(self, grace_s: float, after_s: float = 0) -> None:
        """By itself within ``after_s``, or by a signal; what is left of the group ``grace_s`` after that is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(after_s)
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


def descendants(root: int) -> set[int]:
    """A process, and all that it or they have started."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(file.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found, new = set[int](), [root]
    while new:
        found.add(pid := new.pop())
        new += children.get(pid, [])
    return found


def sizes_mb(file: Path) -> dict[str, float]:
    """The lines of a file of /proc that are sizes, in MB."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1.024e-3 for line in lines if len(line) == 3 and line[2] == "kB"}


class Driver:
    """Started and ready. Raises EngineFailed if it is not within ``start_s`` seconds."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, start_s: float) -> None:
        self._process = Process(command, environment, log, asked=True)
        assert self._process.popen.stdout is not None
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(self._process.popen.stdout,), daemon=True)
        self._reader.start()
        try:
            self.about: dict[str, Any] = self._answer(start_s)
        except EngineFailed:
            self.close()
            raise

    def ask(self, do: str, limit_s: float, **keywords: Any) -> Any:
        """The result of the method ``do`` of the driver's engine, called with these keywords."""
        assert self._process.popen.stdin is not None
        try:
            self._process.popen.stdin.write(json.dumps({"do": do, **keywords}) + "\n")
            self._process.popen.stdin.flush()
        except OSError:
            raise self._ended() from None
        answer = self._answer(limit_s)
        if "error" in answer:
            raise self._process.failed(answer["error"])
        return answer["done"]

    def memory(self) -> dict[str, float]:
        """See `Process.memory`."""
        return self._process.memory()

    def said(self) -> list[str]:
        """The lines it wrote to stderr so far."""
        return self._process.log.read_text(errors="replace").splitlines()

    def close(self) -> None:
        stdin, stdout = self._process.popen.stdin, self._process.popen.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(OSError):
            stdin.close()
        self._process.end(0, after_s=10)  # it ends with its questions
        self._reader.join()
        stdout.close()

    def _read(self, lines: Any) -> None:
        for line in lines:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self._process.end(0)
            raise self._process.failed(f"no answer within {limit_s:.0f} s") from None
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> EngineFailed:
        self._process.end(0, after_s=5)  # its pipe is closed a little before it is gone
        return self._process.failed(f"ended with status {self._process.popen.returncode}")


def wait_until(condition: Any, limit_s: float) -> bool:
    """Looks every 0.2 s."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
