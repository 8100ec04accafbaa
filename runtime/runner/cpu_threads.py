"""Threads of matrix products that survive a neighbour on the cores.

OpenMP's threads spin where they wait for each other. On a quiet machine that is right: waking a sleeping thread takes
tens of microseconds, and a step has hundreds of products. Beside another busy process it is ruinous: a thread spins
away its share of a core while the one it waits for has none. So the worker watches the *run delay* of its threads, the
time for which they were ready to run and did not:

    quiet      all threads, long spins
    crowded    short spins; all threads, or fewer, whichever a small product finds faster at the time

The length of the spins is libgomp's (torch's OpenMP on Linux). It shortens them by itself, from 300,000 turns to 100,
while there are more OpenMP threads than cores (its manual, GOMP_SPINCOUNT). `SpinLimit` makes it so by a team of
threads that only sleeps. With another OpenMP library that has no effect, and the number of threads is what is left.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

WINDOW_S = 0.125
"""Seconds between two checks of the processor."""
CROWDED_DELAY = 0.15
"""Run delay in seconds per second, over all threads. Beside one busy neighbour on two cores it is 0.6 to 0.8, alone
0.01 to 0.02; but threads of one process also delay each other."""
CROWDED_OTHERS = 0.3
"""Cores that others keep busy. Crowded is where both are exceeded."""
QUIET_OTHERS = 0.15
QUIET_WINDOWS = 4
"""Windows in a row with less than QUIET_OTHERS after which the cores are quiet again; after a pause one is enough."""
PROBES = 16
"""Timings of each number of threads, one per window, before the faster one is chosen."""
REST_WINDOWS = 80
"""Windows until they are timed again, as the timed work takes 3 % of a window."""
WORTH_IT = 0.9
"""The other number of threads must take less than this share of the present one's time."""


START_WINDOW_S = 0.08
CROWDED_START = 0.5
"""Cores; a window has eight ticks of the kernel's clock."""

_SCHEDSTAT_BYTES, _STAT_BYTES = 1 << 8, 1 << 18
"""At most: three numbers; a line for each of thousands of cores. (Much larger buffers take longer than to read.)"""


@dataclass(slots=True, frozen=True)
class Usage:
    """Seconds since some moment. run, delay: time that threads of this process ran, and waited for a core. busy: time
    that any process ran on the cores that this process may use."""

    run: float
    delay: float
    busy: float


class UsageReader:
    """Reads the usage so far, several times a second: the files stay open, since to open those of all threads takes
    four times as long as to read them (0.45 and 0.1 ms with 21 threads)."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._tasks: dict[str, BinaryIO] = {}
        self._stat: BinaryIO | None = None

    def __del__(self) -> None:
        for file in (*self._tasks.values(), self._stat):
            if file is not None:
                file.close()

    def __call__(self) -> Usage | None:
        """None if the kernel does not report it."""
        run = delay = 0
        try:
            for task in self._open_tasks():
                try:
                    fields = _read_whole(self._tasks[task], _SCHEDSTAT_BYTES).split()
                except (FileNotFoundError, ProcessLookupError):  # a thread that has ended
                    self._tasks.pop(task).close()
                    continue
                run += int(fields[0])
                delay += int(fields[1])
            if self._stat is None:
                self._stat = (self._proc / "stat").open("rb", buffering=0)
            busy = _busy_ticks(_read_whole(self._stat, _STAT_BYTES).decode(), os.sched_getaffinity(0))
        except (OSError, ValueError, IndexError, AttributeError):
            return None
        return Usage(run / 1e9, delay / 1e9, busy / os.sysconf("SC_CLK_TCK")) if run else None

    def _open_tasks(self) -> list[str]:
        """The threads there are; their files are open."""
        folder = self._proc / "self" / "task"
        tasks = os.listdir(folder)
        for task in self._tasks.keys() - tasks:
            self._tasks.pop(task).close()
        for task in tasks:
            if task not in self._tasks:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                    self._tasks[task] = (folder / task / "schedstat").open("rb", buffering=0)
        return list(self._tasks)


def _read_whole(file: BinaryIO, most: int) -> bytes:
    """The present contents of a file of /proc, up to ``most`` bytes."""
    file.seek(0)
    return file.read(most)


def _busy_ticks(stat: str, cpus: set[int]) -> int:
    """Busy ticks of these CPUs in /proc/stat: user, nice, system, irq and softirq, without idle time, disk waits and
    time stolen by a host."""
    total = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _, _, irq, softirq = map(int, fields[:7])
            total += user + nice + system + irq + softirq
    return total


class OtherProcesses:
    """Measures the cores that other processes keep busy."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, read: Callable[[], Usage | None] | None = None):
        self._clock, self._read = clock, read or UsageReader()
        self._last: tuple[float, Usage] | None = None
        self._cores = 0.0

    def busy_cores(self) -> float:
        """How many since the last call; within `WINDOW_S` of it, as many as it returned. 0 where the kernel does not
        report it."""
        now, last = self._clock(), self._last
        if last is not None and now < last[0] + WINDOW_S:
            return self._cores
        usage = self._read()
        if usage is None:
            return 0.0
        if last is not None:
            then, before = last
            self._cores = max(0.0, (usage.busy - before.busy - (usage.run - before.run)) / (now - then))
        self._last = now, usage
        return self._cores


class Crew(Protocol):
    """The threads of matrix products, as `CpuThreads` controls and times them."""

    def use_threads(self, threads: int, *, spin: bool) -> None: ...

    def time_work(self, threads: int) -> float:
        """Seconds of a small piece of work with so many threads."""
        ...


class OpenMPCrew:
    """torch's threads. To be used from the thread that runs the model: their number is each thread's own."""

    def __init__(self) -> None:
        self._limit: SpinLimit | None = None
        self._work: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    def use_threads(self, threads: int, *, spin: bool) -> None:
        if spin and self._limit is not None:
            self._limit.end()
            self._limit = None
        elif not spin and self._limit is None:
            self._limit = SpinLimit()
        torch.set_num_threads(threads)

    def time_work(self, threads: int) -> float:
        if self._work is None:
            generator = torch.Generator().manual_seed(0)
            weights = [torch.randn(512, 1024, generator=generator) for _ in range(6)]
            self._work = torch.randn(8, 1024, generator=generator), weights
        x, weights = self._work
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        began = time.perf_counter()
        for weight in weights:
            F.linear(x, weight)
        seconds = time.perf_counter() - began
        torch.set_num_threads(before)
        return seconds


class SpinLimit:
    """Shortens the spins of all OpenMP threads of this process until `end`.

    A thread of Python runs one operation on as many OpenMP threads as there are cores, and sleeps. As long as it lives,
    so does its team.
    """

    def __init__(self) -> None:
        self._end = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="openmp-spin-limit", daemon=True)
        self._thread.start()
        self._ready.wait()

    def end(self) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        before = torch.get_num_threads()
        try:
            threads = max(2, len(os.sched_getaffinity(0)))
            torch.set_num_threads(threads)
            torch.ones(threads << 16).add_(1)  # large enough for a part each
        finally:
            torch.set_num_threads(before)  # later threads of Python take it over; the team stays as it is
            self._ready.set()  # whatever went wrong, the model's thread must not wait for ever
        self._end.wait()


@contextlib.contextmanager
def short_spins_if_crowded(proc: Path = Path("/proc")) -> Iterator[bool]:
    """For a start, which cannot adjust threads between steps: short spins if processes other than this server's keep
    cores busy now. Gives True if so. Looks for `START_WINDOW_S`."""
    limit = SpinLimit() if _busy_strangers(proc) > CROWDED_START else None
    if limit is not None:
        logger.info("other processes use the cores: spins are short until the model is loaded")
    try:
        yield limit is not None
    finally:
        if limit is not None:
            limit.end()


def _busy_strangers(proc: Path) -> float:
    """Cores that others keep busy, without the parent process and its children; 0 where the kernel does not report
    it."""
    try:
        began, before = time.perf_counter(), _stranger_ticks(proc)
        time.sleep(START_WINDOW_S)
        ticks = _stranger_ticks(proc) - before
        return ticks / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def _stranger_ticks(proc: Path) -> int:
    parent = str(os.getppid())
    family = [parent, *(proc / parent / "task" / parent / "children").read_text().split()]
    own = 0
    for pid in family:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            fields = (proc / pid / "stat").read_text().rpartition(")")[2].split()
            own += int(fields[11]) + int(fields[12])
    return _busy_ticks((proc / "stat").read_text(), os.sched_getaffinity(0)) - own


class CpuThreads:
    """Sets the number of computing threads and the length of their spins. `adjust_threads` is called between steps."""

    def __init__(self, threads: int, crew: Crew | None = None, read: Callable[[], Usage | None] | None = None) -> None:
        """threads: how many there are on a quiet machine."""
        self._all = threads
        self._crew = crew or OpenMPCrew()
        self._read = read or UsageReader()
        self.threads = threads
        self.crowded = False
        self._last: tuple[float, Usage] | None = None
        self._due = -math.inf
        self._quiet_windows = 0
        self._others = 0.0
        self._times: dict[int, list[float]] = {}
        self._rest = 0

    def adjust_threads(self, now: float, *, after_idle_work: bool = False) -> None:
        """Evaluate the last window, if it is over. now: seconds, on the loop's clock. after_idle_work: True
        if trials ran since the last step: a processor that was crowded beside them may be free now."""
        if now < self._due:
            return
        self._due = now + WINDOW_S
        usage, last = self._read(), self._last
        if usage is None:
            self._due = math.inf
            return
        self._last = (now, usage)
        if last is None:
            return
        then, before = last
        elapsed = now - then
        delay = (usage.delay - before.delay) / elapsed
        self._others = max(0.0, (usage.busy - before.busy - (usage.run - before.run)) / elapsed)
        windows = max(1, round(elapsed / WINDOW_S))
        self._quiet_windows = self._quiet_windows + windows if self._others < QUIET_OTHERS else 0
        if not self.crowded and not after_idle_work and delay > CROWDED_DELAY and self._others > CROWDED_OTHERS:
            self.crowded = True
            self._use(self._all, f"other processes use {self._others:.1f} cores (run delay {delay:.0%})")
        elif self.crowded and self._quiet_windows >= QUIET_WINDOWS:
            self.crowded = False
            self._times.clear()
            self._rest = 0
            self._use(self._all, "the cores are free again")
        elif self.crowded:
            self._try_fewer()

    def _try_fewer(self) -> None:
        """Time all threads, and as many as other processes leave cores for, alternately, as the load changes."""
        fewer = max(1, self._all - max(1, round(self._others)))
        if fewer == self._all or self._rest:
            self._rest = max(0, self._rest - 1)
            return
        for threads in (self._all, fewer):
            self._times.setdefault(threads, []).append(self._crew.time_work(threads))
        other = fewer if self.threads == self._all else self._all
        mine, theirs = self._times.get(self.threads, []), self._times[other]
        if len(theirs) < PROBES:
            return
        if not mine or sum(theirs) / len(theirs) < WORTH_IT * sum(mine) / len(mine):
            self._use(other, "faster beside the others")
        self._times.clear()
        self._rest = REST_WINDOWS

    def _use(self, threads: int, why: str) -> None:
        self.threads = threads
        self._crew.use_threads(threads, spin=not self.crowded)
        logger.info("%s: threads %d, spins %s", why, threads, "short" if self.crowded else "long")


class WatchThreads(Protocol):
    def __call__(self, now: float, *, after_idle_work: bool) -> None:
        """See `CpuThreads.adjust_threads`."""
        ...


def watch_cpu_threads(device: str) -> WatchThreads:
    """The function to call between steps; it does nothing where threads cannot compete."""
    threads = torch.get_num_threads()
    if device != "cpu" or threads == 1:
        return lambda now, *, after_idle_work: None
    return CpuThreads(threads).adjust_threads
