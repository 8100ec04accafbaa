"""Decodes that repeat the plan of the step before read and write what planning each step anew has them read and write.

The twin of each scheduler begins no run, and looks for the slot of each row.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton.scheduler.scheduler import Scheduler
from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import Harness
from tests.doubles.simulation import SEED

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


class Traced:
    """Notes each step's states, and which ones each sequence names once its result is processed."""

    def __init__(self, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, *, runs: bool) -> None:
        self.notes: list[Any] = []
        self.repeated = 0
        states = scheduler._memory.states
        assert states is not None
        next_batch, process, repeat = scheduler.next_batch, scheduler.process_result, states._continue_run

        def form(now):
            batch = next_batch(now)
            if batch is not None and batch.states is not None:
                rows = batch.states
                arrays = batch.serials, rows.sources, rows.rows, rows.ends, rows.slots
                self.notes.append([array.tolist() for array in arrays])
            return batch

        def finish(result, now):
            events = process(result, now)
            holders = [request for request in scheduler.live_requests if request.kv is not None]
            self.notes.append({request.serial: request.held_kv.states.held for request in holders})
            return events

        def count(*args):
            self.repeated += 1
            return repeat(*args)

        monkeypatch.setattr(scheduler, "next_batch", form)
        monkeypatch.setattr(scheduler, "process_result", finish)
        monkeypatch.setattr(states, "_continue_run", count)
        if not runs:
            monkeypatch.setattr(states, "_begin_run", lambda step, rows: None)
            monkeypatch.setattr(states, "_reserve_own", lambda request, may_end: False)


def drive(harness: Harness, rng: random.Random) -> None:
    """Random requests that come and go while others decode: forks, aborts, exceptions, beginnings of stop strings.
    There is memory for all."""
    forward = harness.model.forward

    def begin_stops(batch, fault):
        result = forward(batch, fault)
        if rng.random() < 0.1:
            row = rng.randrange(len(batch))
            if batch.samples[row]:
                result.stop_begins[row] = max(0, int(batch.output_positions[row]) - rng.randrange(2))
        return result

    confirm_taken = harness.scheduler._memory.copies.confirm_taken

    def fail_formed() -> None:
        if rng.random() < 0.02 and not any(request.is_search for request in harness.scheduler.live_requests):
            raise RuntimeError("the step is discarded, though what it writes is planned")
        confirm_taken()

    harness.model.forward = begin_stops  # type: ignore[method-assign]
    harness.scheduler._memory.copies.confirm_taken = fail_formed  # type: ignore[method-assign]
    harness.fault = lambda batch: "compute" if rng.random() < 0.01 else None
    for number in range(200):
        running = [r.rid for r in harness.scheduler.live_requests if r.num_output_tokens and not r.is_search]
        drawn = rng.random()
        if drawn < 0.06 and len(running) < 5:
            more: dict[str, Any] = {"beam_width": 3, "n": 3} if rng.random() < 0.1 else {}
            harness.add(f"r{number}", prompt_of(rng.randrange(1, 60), number % 3), rng.randrange(1, 50), **more)
        elif drawn < 0.09 and running and len(running) < 5:
            harness.continue_from(rng.choice(running), f"r{number}", [1, 2], rng.randrange(1, 30), at="now")
        elif drawn < 0.1 and running:
            harness.abort(rng.choice(running))
        elif drawn < 0.12:  # an exception that no request caused
            harness.take_ends(harness.scheduler.contain(RuntimeError(), [], harness.now))
        harness.step()
    harness.run()


@DEPTHS
@pytest.mark.parametrize("more", [{}, {"enable_mixed_chunk": True, "chunk": 7}, {"page_size": 16}], ids=str)
def test_runs_change_nothing(more: dict[str, Any], depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"BATON_SIM_SEED={SEED}")
    for seed in range(SEED, SEED + 3):
        traces = []
        for runs in (True, False):
            harness = Harness(num_tokens=8192, rows=4, states=200, context=512, depth=depth, **more)
            traces.append(Traced(harness.scheduler, monkeypatch, runs=runs))
            drive(harness, random.Random(seed))
        fast, slow = traces
        assert fast.notes == slow.notes
        assert slow.repeated == 0 and (fast.repeated > 5) == ("page_size" not in more)
