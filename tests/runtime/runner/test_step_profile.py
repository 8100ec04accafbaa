from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baton.runtime.runner.step_profile import MAX_TURNS, PHASES, StepProfiler, Turn, describe
from baton.scheduler.batch import ForwardMode

CPU = torch.device("cpu")


class Event:
    """Stands in for a CUDA event at a time, in ms."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def step(mode: ForwardMode, lens: list[int]) -> Any:
    class Batch(SimpleNamespace):
        def __len__(self) -> int:
            return len(lens)

    return Batch(mode=mode, extend_lens=np.array(lens))


def turn(kind: str, began: float | None = None, ended: float | None = None, **laps: float) -> Turn:
    events: Any = [None if at is None else Event(at) for at in (began, ended)]
    given: Any = laps
    return Turn(kind, 2, 4, given, *events)


def test_profile_phases_cover_the_whole_turn():
    seconds = itertools.count()
    profiler = StepProfiler(CPU, clock=lambda: float(next(seconds)))
    profiler.lap("receive")
    profiler.end_turn(step(ForwardMode.DECODE, [1]))
    profiler.start()
    for mode, lens in ((ForwardMode.EXTEND, [30, 10]), (ForwardMode.DECODE, [1, 1]), (ForwardMode.DECODE, [1, 1, 1])):
        for phase in PHASES:
            profiler.lap(phase)
        profiler.end_turn(step(mode, lens))
    profile = profiler.stop()
    assert profile["steps"] == 3 and set(profile["kinds"]) == {"all", "extend", "decode"}
    every, extend, decode = (profile["kinds"][kind] for kind in ("all", "extend", "decode"))
    assert every["step_ms"] == {"median": 7000.0, "p95": 7000.0, "total": 21000.0}
    assert every["host_ms"]["median"] == 5000.0, "on a CPU the launch is the computation"
    assert extend["new_tokens"] == {"min": 40, "median": 40.0, "max": 40}
    assert decode["steps"] == 2 and decode["rows"] == {"min": 2, "median": 2.5, "max": 3}
    assert every["device_ms"] == every["gap_ms"] == {}
    assert not profiler.recording and profiler.stop()["steps"] == 0, "what was told is forgotten"


def test_turn_without_step_counts_toward_the_next():
    seconds = itertools.count()
    profiler = StepProfiler(CPU, clock=lambda: float(next(seconds)))
    profiler.start()
    profiler.lap("receive")
    profiler.end_turn(None)
    profiler.lap("idle")
    profiler.lap("receive")
    profiler.lap("commit")
    profiler.end_turn(step(ForwardMode.DECODE, [1]))
    profile = profiler.stop()
    assert profile["kinds"]["decode"]["phases_ms"]["receive"]["total"] == 2000.0
    assert profile["kinds"]["decode"]["step_ms"]["total"] == 3000.0 and profile["idle_ms"] == 1000.0


def test_turn_with_sleep_is_wholly_idle():
    """Else a long quiet time would end up in the first step after it."""
    seconds = itertools.count()
    profiler = StepProfiler(CPU, clock=lambda: float(next(seconds)))
    profiler.start()
    for _ in range(10):
        for phase in ("idle", "receive", "schedule"):
            profiler.lap(phase)
        profiler.end_turn(None)
    profiler.lap("receive")
    profiler.end_turn(step(ForwardMode.DECODE, [1]))
    profile = profiler.stop()
    assert profile["kinds"]["decode"]["step_ms"]["total"] == 1000.0 and profile["idle_ms"] == 30000.0


def test_device_time_between_the_events():
    profile = describe(
        [
            turn("extend", 10.0, 14.0, launch=0.001),
            turn("decode", 14.5, 17.5, launch=0.001),
            turn("decode", 17.75, 20.75, launch=0.001),
            turn("decode", launch=0.001),
            turn("decode", 40.0, 43.0, launch=0.001),
            turn("decode", 60.0, 63.0, launch=0.001, idle=0.01),
        ],
        "cuda",
    )
    decode = profile["kinds"]["decode"]
    assert decode["device_ms"] == {"median": 3.0, "p95": 3.0, "total": 12.0}
    assert decode["gap_ms"]["total"] == 0.75, "not where a step is missing or there was no work"
    assert profile["kinds"]["extend"]["gap_ms"] == {} and decode["host_ms"]["median"] == 1.0


def test_events_are_recorded_after_plan_and_launch(monkeypatch: pytest.MonkeyPatch):
    moments = itertools.count()

    class Recorded(Event):
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.at = float(next(moments))

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    profiler = StepProfiler(torch.device("cuda"))
    profiler.start()
    for _ in range(3):
        for phase in PHASES:
            profiler.lap(phase)
        profiler.end_turn(step(ForwardMode.DECODE, [1]))
    profiler.lap("plan")
    profiler.end_turn(None)  # the launch failed
    group = profiler.stop()["kinds"]["decode"]
    assert group["steps"] == 3
    assert group["device_ms"]["total"] == 3.0 and group["gap_ms"]["total"] == 2.0


def test_profile_without_steps_is_empty():
    assert describe([], "cpu")["kinds"]["all"]["step_ms"] == {}


def test_profile_keeps_only_the_last_turns():
    profiler = StepProfiler(CPU)
    profiler.start()
    batch = step(ForwardMode.DECODE, [1])
    for _ in range(MAX_TURNS + 5):
        profiler.end_turn(batch)
    assert profiler.stop()["steps"] == MAX_TURNS


@pytest.mark.gpu
def test_profile_times_the_gpu():
    profiler = StepProfiler(torch.device("cuda"))
    matrix = torch.ones(4096, 4096, device="cuda")
    profiler.start()
    for _ in range(3):
        profiler.lap("plan")
        for _ in range(10):
            torch.mm(matrix, matrix)
        profiler.lap("launch")
        profiler.end_turn(step(ForwardMode.DECODE, [1]))
    group = profiler.stop()["kinds"]["decode"]
    assert group["device_ms"]["median"] > 0.1 and 0 <= group["gap_ms"]["median"] < 100
