"""When threads stop spinning, when fewer compute, and when all is as before. The processor is the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from baton.runtime.runner import cpu_threads
from baton.runtime.runner.cpu_threads import (
    CROWDED_DELAY,
    CROWDED_OTHERS,
    PROBES,
    QUIET_OTHERS,
    QUIET_WINDOWS,
    REST_WINDOWS,
    WINDOW_S,
    CpuThreads,
    OpenMPCrew,
    OtherProcesses,
    SpinLimit,
    Usage,
    UsageReader,
    watch_cpu_threads,
)


class Processor:
    """run, delay, others: seconds per second of the windows to come. speeds: seconds that the small work takes."""

    def __init__(self, threads: int = 2) -> None:
        self.run, self.delay, self.others = 1.9, 0.0, 0.0
        self.speeds: dict[int, float] = {}
        self.used: list[tuple[int, bool]] = []
        self.now = 100.0
        self._usage = Usage(0.0, 0.0, 0.0)
        self.governor = CpuThreads(threads, crew=self, read=self.read)
        self.governor.adjust_threads(self.now)

    def read(self) -> Usage | None:
        return self._usage

    def use_threads(self, threads: int, *, spin: bool) -> None:
        self.used.append((threads, spin))

    def time_work(self, threads: int) -> float:
        return self.speeds[threads]

    def pass_windows(self, number: int, of: float = WINDOW_S, *, after_idle_work: bool = False) -> None:
        for _ in range(number):
            u = self._usage
            self._usage = Usage(
                u.run + self.run * of, u.delay + self.delay * of, u.busy + (self.run + self.others) * of
            )
            self.now += of
            self.governor.adjust_threads(self.now, after_idle_work=after_idle_work)


def crowded(threads: int = 2, others: float = 1.0, **speeds: float) -> Processor:
    """A processor that has just become crowded. speeds: t1=..., t2=..."""
    processor = Processor(threads)
    processor.speeds = {int(name[1:]): seconds for name, seconds in speeds.items()}
    processor.others, processor.delay = others, 0.6
    processor.pass_windows(1)
    assert processor.used == [(threads, False)]
    return processor


class TestCrowded:
    @pytest.mark.parametrize(
        "delay, others", [(0.9 * CROWDED_DELAY, 1.0), (0.9, 0.9 * CROWDED_OTHERS)], ids=["others", "itself"]
    )
    def test_threads_are_unchanged_without_contention(self, delay: float, others: float) -> None:
        """Threads of one process may well delay each other: an Engine's loop and its model."""
        processor = Processor()
        processor.delay, processor.others = delay, others
        processor.pass_windows(100)
        assert processor.used == []

    def test_contended_window_stops_spinning(self) -> None:
        processor = Processor()
        processor.delay, processor.others = 1.1 * CROWDED_DELAY, 1.1 * CROWDED_OTHERS
        processor.pass_windows(1)
        assert processor.used == [(2, False)]

    def test_usage_is_not_read_within_a_window(self, monkeypatch: pytest.MonkeyPatch) -> None:
        processor = Processor()
        monkeypatch.setattr(processor.governor, "_read", lambda: pytest.fail("read"))
        processor.governor.adjust_threads(processor.now + 0.9 * WINDOW_S)

    def test_spinning_resumes_after_consecutive_quiet_windows(self) -> None:
        processor = crowded(t1=1.0, t2=1.0)
        processor.others = 0.9 * QUIET_OTHERS
        processor.pass_windows(QUIET_WINDOWS - 1)
        processor.others = 1.1 * QUIET_OTHERS
        processor.pass_windows(1)
        processor.others = 0.0
        processor.pass_windows(QUIET_WINDOWS - 1)
        assert processor.used == [(2, False)], "one window between was not quiet"
        processor.pass_windows(1)
        assert processor.used == [(2, False), (2, True)]

    def test_spinning_resumes_after_quiet_pause(self) -> None:
        processor = crowded(t1=1.0, t2=1.0)
        processor.run, processor.delay, processor.others = 0.01, 0.0, 0.0
        processor.pass_windows(1, of=40 * WINDOW_S)
        assert processor.used == [(2, False), (2, True)]

    def test_spinning_stays_off_after_contended_pause(self) -> None:
        processor = crowded(t1=1.0, t2=1.0)
        processor.run, processor.delay, processor.others = 0.01, 0.0, 1.0
        processor.pass_windows(1, of=40 * WINDOW_S)
        assert processor.used == [(2, False)]

    def test_contention_beside_idle_work_is_not_that_of_now(self) -> None:
        processor = Processor()
        processor.delay, processor.others = 0.6, 1.0
        processor.pass_windows(1, of=30 * WINDOW_S, after_idle_work=True)
        assert processor.used == []
        processor.delay, processor.others = 0.0, 0.0
        processor.pass_windows(10)
        assert processor.used == []
        processor.delay, processor.others = 0.6, 1.0
        processor.pass_windows(1)
        assert processor.used == [(2, False)]

    def test_contention_during_long_step_stops_spinning(self) -> None:
        processor = Processor()
        processor.delay, processor.others = 0.6, 1.0
        processor.pass_windows(1, of=30 * WINDOW_S)
        assert processor.used == [(2, False)]

    def test_a_kernel_without_usage_is_read_once(self) -> None:
        reads = []
        governor = CpuThreads(2, crew=Processor(), read=lambda: reads.append(1))
        for second in range(10):
            governor.adjust_threads(float(second))
        assert len(reads) == 1


class TestFewer:
    def test_fewer_threads_are_used_if_faster(self) -> None:
        processor = crowded(t1=0.8, t2=1.0)
        processor.pass_windows(PROBES - 1)
        assert processor.governor.threads == 2
        processor.pass_windows(1)
        assert processor.used[1:] == [(1, False)]

    def test_small_gain_does_not_change_thread_count(self) -> None:
        processor = crowded(t1=0.95, t2=1.0)
        processor.pass_windows(3 * (PROBES + REST_WINDOWS))
        assert processor.governor.threads == 2

    def test_all_threads_return_when_speeds_change(self) -> None:
        processor = crowded(t1=0.8, t2=1.0)
        processor.pass_windows(PROBES)
        assert processor.governor.threads == 1
        processor.speeds = {1: 1.0, 2: 0.8}
        processor.pass_windows(REST_WINDOWS + PROBES - 1)
        assert processor.governor.threads == 1, "they are not compared all the time"
        processor.pass_windows(1)
        assert processor.used[1:] == [(1, False), (2, False)]

    def test_all_threads_spin_again_when_quiet(self) -> None:
        processor = crowded(t1=0.8, t2=1.0)
        processor.pass_windows(PROBES)
        processor.others = 0.0
        processor.pass_windows(QUIET_WINDOWS)
        assert processor.used[-1] == (2, True) and processor.governor.threads == 2

    @pytest.mark.parametrize("others, fewer", [(1.0, 7), (2.6, 5), (30.0, 1), (0.4, 7)])
    def test_thread_count_follows_cores_left_by_others(self, others: float, fewer: int) -> None:
        processor = crowded(8, others, **{f"t{fewer}": 0.5, "t8": 1.0})
        processor.pass_windows(PROBES)
        assert processor.governor.threads == fewer

    def test_changing_neighbours_change_the_compared_threads(self) -> None:
        processor = crowded(8, 1.0, t7=0.5, t5=0.5, t8=1.0)
        processor.pass_windows(PROBES)
        processor.others = 3.0
        processor.pass_windows(2 * (REST_WINDOWS + PROBES))
        assert processor.governor.threads == 5, "back to all first, and from there to five"


def test_cores_that_other_processes_keep_busy() -> None:
    now, usage = 0.0, Usage(0.0, 0.0, 0.0)
    others = OtherProcesses(clock=lambda: now, read=lambda: usage)
    assert others.busy_cores() == 0.0, "nothing to compare with"
    now, usage = 2.0, Usage(run=3.0, delay=0.0, busy=3.8)
    assert others.busy_cores() == pytest.approx(0.4)
    now, usage = 2.0 + WINDOW_S / 2, Usage(9.0, 0.0, 99.0)
    assert others.busy_cores() == pytest.approx(0.4), "the kernel's ticks are too coarse for less"
    now, usage = 4.0, Usage(run=6.0, delay=0.0, busy=6.7)  # ticks are rounded
    assert others.busy_cores() == 0.0
    assert OtherProcesses(read=lambda: None).busy_cores() == 0.0


class TestReading:
    def test_read_usage_on_this_machine(self) -> None:
        read = UsageReader()
        before = read()
        if before is None:
            pytest.skip("this kernel keeps no schedstat")
        sum(range(10**6))
        after = read()
        assert after is not None and after.run > before.run and after.delay >= before.delay
        assert after.busy >= before.busy > 0

    def test_usage_counts_only_allowed_cores(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for task, text in (("10", "3000000000 500000000 7"), ("11", "1000000000 250000000 7")):
            (tmp_path / "self/task" / task).mkdir(parents=True)
            (tmp_path / "self/task" / task / "schedstat").write_text(text)
        (tmp_path / "self/task/12").mkdir()  # has just ended
        lines = (
            "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 200 300 9999 9999 40 50 60 0 0\ncpu1 7 7 7 7 7 7 7 7 7 7\nintr 1 2\n"
        )
        (tmp_path / "stat").write_text(lines)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
        assert UsageReader(tmp_path)() == Usage(4.0, 0.75, 690 / os.sysconf("SC_CLK_TCK"))

    @pytest.mark.parametrize("content", ["", "0 0 0", "rubbish"])
    def test_read_usage_without_schedstat_is_none(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "self/task/10").mkdir(parents=True)
        (tmp_path / "self/task/10/schedstat").write_text(content)
        (tmp_path / "stat").write_text("cpu0 1 1 1 1 1 1 1 1 1 1\n")
        assert UsageReader(tmp_path)() is None
        assert UsageReader(tmp_path / "missing")() is None

    def test_threads_that_come_and_go_are_followed(self) -> None:
        read = UsageReader()
        if read() is None:
            pytest.skip("this kernel keeps no schedstat")
        spun, end = threading.Event(), threading.Event()

        def spin() -> None:
            sum(range(10**7))
            spun.set()
            end.wait()

        before = read()
        thread = threading.Thread(target=spin)
        thread.start()
        spun.wait()
        during = read()
        assert before is not None and during is not None and during.run > before.run
        task = str(thread.native_id)
        assert task in read._tasks
        end.set()
        thread.join()
        while Path(f"/proc/self/task/{task}").exists():  # the kernel's thread ends a little later
            time.sleep(0.001)
        after = read()
        assert after is not None and after.run < during.run, "what has ended is not counted"
        assert task not in read._tasks


class TestThreads:
    def test_timing_restores_thread_count(self) -> None:
        crew, before = OpenMPCrew(), torch.get_num_threads()
        assert 0 < crew.time_work(2) < 60 and torch.get_num_threads() == before

    def test_spin_limit_thread_ends(self) -> None:
        crew, before = OpenMPCrew(), torch.get_num_threads()
        names = lambda: [thread.name for thread in threading.enumerate()].count("openmp-spin-limit")  # noqa: E731
        try:
            for _ in range(2):
                crew.use_threads(before, spin=False)
                assert names() == 1 and torch.get_num_threads() == before
            crew.use_threads(before, spin=True)
            assert names() == 0
        finally:
            torch.set_num_threads(before)

    def test_a_failed_spin_limit_delays_no_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(pid: int) -> set[int]:
            raise OSError("no such call")

        monkeypatch.setattr(os, "sched_getaffinity", fail)
        monkeypatch.setattr(threading, "excepthook", lambda args: None)
        made = threading.Thread(target=SpinLimit, daemon=True)
        made.start()
        made.join(60)
        assert not made.is_alive()

    def test_spin_limit_does_not_change_how_many_threads_torch_uses(self) -> None:
        """Threads of Python that begin later take the last number that any thread has set."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            limit, found = SpinLimit(), []
            later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            later.start()
            later.join(60)
            limit.end()
            assert found == [1] and torch.get_num_threads() == 1
        finally:
            torch.set_num_threads(before)

    def test_gpu_or_single_thread_is_not_watched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        assert isinstance(getattr(watch_cpu_threads("cpu"), "__self__", None), CpuThreads)
        assert not hasattr(watch_cpu_threads("cuda"), "__self__")
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert not hasattr(watch_cpu_threads("cpu"), "__self__")

    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
    def test_spin_limit_thread_team_ends_with_it(self) -> None:
        """In a process of its own, whose threads can be counted. More of them than cores is what shortens the spins."""
        program = (
            "import os, time, torch\n"
            "from baton.runtime.runner.cpu_threads import SpinLimit\n"
            "torch.set_num_threads(2); torch.ones(1 << 20).add_(1)\n"
            "count = lambda: len(os.listdir('/proc/self/task'))\n"
            "before = count(); limit = SpinLimit(); during = count(); limit.end()\n"
            "deadline = time.monotonic() + 60\n"
            "while count() > before and time.monotonic() < deadline: time.sleep(0.01)\n"
            "print(before, during, count())\n"
        )
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
        before, during, after = map(int, run.stdout.split())
        assert during >= before + 2, "a thread and at least one more of its team"
        assert after == before, "the team has gone with its thread"


def write_proc(proc: Path, busy: int, family: int) -> None:
    """Ticks that all processes ran, and those of this server: of the parent and one of its children."""
    cpus = sorted(os.sched_getaffinity(0))
    lines = [f"cpu{cpu} {busy if cpu == cpus[0] else 0} 0 0 50 0 0 0 0 0 0" for cpu in cpus]
    (proc / "stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0", *lines, "intr 0"]))
    parent = str(os.getppid())
    for pid, ticks in ((parent, family), ("77", 0)):
        (proc / pid).mkdir(exist_ok=True)
        fields = ["S", *["0"] * 10, str(ticks), "0", *["0"] * 9]
        (proc / pid / "stat").write_text(f"{pid} (a name) with) " + " ".join(fields))
    children = proc / parent / "task" / parent
    children.mkdir(parents=True, exist_ok=True)
    (children / "children").write_text("77 78")


@pytest.mark.parametrize(("busy", "family", "expected"), [(8, 0, True), (8, 8, False), (16, 8, True), (0, 0, False)])
def test_start_beside_strangers_has_short_spins(
    tmp_path: Path, busy: int, family: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server's other processes do is no reason; 78 has just ended."""
    write_proc(tmp_path, 100, 50)
    monkeypatch.setattr(cpu_threads.time, "sleep", lambda _: write_proc(tmp_path, 100 + busy, 50 + family))
    monkeypatch.setattr(cpu_threads.time, "perf_counter", iter([0.0, 0.08]).__next__)
    with cpu_threads.short_spins_if_crowded(tmp_path) as is_short:
        limits = [thread for thread in threading.enumerate() if thread.name == "openmp-spin-limit"]
        assert is_short == bool(limits) == expected
    assert not [thread for thread in threading.enumerate() if thread.name == "openmp-spin-limit"]


def test_start_without_counts_of_the_kernel_is_quiet(tmp_path: Path) -> None:
    with cpu_threads.short_spins_if_crowded(tmp_path) as is_short:
        assert not is_short
