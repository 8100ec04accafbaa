"""Measures where steps spend their time: on the host by phase, on the device by events around the computation.

    host    |receive|schedule|  plan  |launch|        wait        |commit|receive|schedule| …
    device  ······ gap ···············|====== step N ======|······ gap ······

The loop, the step runner and the model runner share one `StepProfiler` and call `lap` where a phase ends. While it is
not recording, a call only tests a flag. All phases run on one thread and none of its time is left out: the phases of a
turn of the loop add up to the turn.

With overlapped scheduling, ``wait`` and ``commit`` of a turn belong to the previous step; the numbers per turn are the
same. Time that the loop sleeps for lack of work is ``idle`` and belongs to no step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ...scheduler.batch import ScheduleBatch

Phase = Literal["idle", "receive", "schedule", "tiers", "plan", "launch", "wait", "commit"]

PHASES: tuple[Phase, ...] = ("receive", "schedule", "tiers", "plan", "launch", "wait", "commit")
"""In the order of a turn.

receive: take and handle messages; schedule: form the next batch; tiers: order copies between the tiers, and settle
those that have ended; plan: upload the batch and plan attention;
launch: start forward and sampling (on a CPU: run them); wait: for the device; commit: process results, send outputs.
"""

MAX_TURNS = 10_000
"""Older turns are forgotten."""


@dataclass(slots=True)
class Turn:
    """One turn of the loop that launched a step. laps: seconds by phase."""

    kind: str
    """extend or decode"""
    rows: int
    new_tokens: int
    laps: dict[Phase, float]
    began: torch.cuda.Event | None = None
    """When the device began the step; ``ended`` likewise."""
    ended: torch.cuda.Event | None = None


class StepProfiler:
    """Records turns between `start` and `stop`. One thread."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds."""
        self.recording = False
        self._device = device
        self._clock = clock
        self._clear()

    def start(self) -> None:
        """Forget what was recorded before and record from now on."""
        self._clear()
        self.recording = True

    def stop(self) -> dict[str, Any]:
        """Stop recording, wait for the device's last step, and return what `describe` makes of the turns."""
        self.recording = False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profile = describe(self._turns, self._device.type)
        self._clear()
        return profile

    def lap(self, phase: Phase) -> None:
        """Count the time since the last lap as this phase. The device's part lasts from the end of plan to the end of
        launch."""
        if not self.recording:
            return
        now = self._clock()
        self._laps[phase] = self._laps.get(phase, 0.0) + now - self._last
        self._last = now
        if self._device.type == "cuda" and phase in ("plan", "launch"):
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            if phase == "plan":
                self._began, self._ended = event, None
            else:
                self._ended = event

    def end_turn(self, batch: ScheduleBatch | None) -> None:
        """``batch``: the step that was launched in the turn. Without one, the turn's time is added to the next turn's,
        as idle if the loop slept."""
        if not self.recording:
            return
        if batch is not None:
            kind, tokens = batch.mode.value, int(batch.extend_lens.sum())
            self._turns.append(Turn(kind, len(batch), tokens, self._laps, self._began, self._ended))
            self._laps = {}
        elif "idle" in self._laps:
            self._laps = {"idle": sum(self._laps.values())}
        self._began = self._ended = None

    def _clear(self) -> None:
        self._turns: deque[Turn] = deque(maxlen=MAX_TURNS)
        self._laps: dict[Phase, float] = {}
        self._last = self._clock()
        self._began: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None


def describe(turns: Iterable[Turn], device_type: str) -> dict[str, Any]:
    """JSON: counts, and times in ms as {median, p95, total}, for all turns and for each kind alone.

    host_ms is the host's own work: every phase but wait, and on a CPU but launch, which is the computation there.
    device_ms and gap_ms (from the end of the previous step to the start of this one) are empty without a device.
    """
    every = list(turns)
    device_ms, gap_ms = _device_times(every)
    elsewhere: set[Phase] = {"wait", "launch"} if device_type == "cpu" else {"wait"}
    host: list[Phase] = [phase for phase in PHASES if phase not in elsewhere]
    kinds = ["all", *dict.fromkeys(turn.kind for turn in every)]
    groups = {}
    for kind in kinds:
        chosen = [i for i, turn in enumerate(every) if kind in ("all", turn.kind)]
        laps = [every[i].laps for i in chosen]
        groups[kind] = {
            "steps": len(chosen),
            "rows": _spread([every[i].rows for i in chosen]),
            "new_tokens": _spread([every[i].new_tokens for i in chosen]),
            "step_ms": _times([sum(lap.get(phase, 0.0) for phase in PHASES) * 1e3 for lap in laps]),
            "host_ms": _times([sum(lap.get(phase, 0.0) for phase in host) * 1e3 for lap in laps]),
            "phases_ms": {phase: _times([lap.get(phase, 0.0) * 1e3 for lap in laps]) for phase in PHASES},
            "device_ms": _times([device_ms[i] for i in chosen if i in device_ms]),
            "gap_ms": _times([gap_ms[i] for i in chosen if i in gap_ms]),
        }
    return {
        "device": device_type,
        "steps": len(every),
        "idle_ms": sum(turn.laps.get("idle", 0.0) for turn in every) * 1e3,
        "kinds": groups,
    }


def _device_times(turns: list[Turn]) -> tuple[dict[int, float], dict[int, float]]:
    """(ms on the device, ms the device stood still before it) by turn, where known. A gap in which the loop slept does
    not count: there was no work."""
    busy: dict[int, float] = {}
    gaps: dict[int, float] = {}
    before: torch.cuda.Event | None = None
    for i, turn in enumerate(turns):
        if turn.began is None or turn.ended is None:
            before = None
            continue
        busy[i] = turn.began.elapsed_time(turn.ended)
        if before is not None and "idle" not in turn.laps:
            gaps[i] = before.elapsed_time(turn.began)
        before = turn.ended
    return busy, gaps


def _times(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    median, p95 = np.percentile(values, [50, 95]).tolist()
    return {"median": median, "p95": p95, "total": float(sum(values))}


def _spread(values: list[int]) -> dict[str, float]:
    return {"min": min(values), "median": float(np.median(values)), "max": max(values)} if values else {}
