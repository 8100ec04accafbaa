"""Schedulers that get the same calls with the same `now` decide the same, byte for byte: what ranks rely on.

And what a step's order holds is plain data, all of it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.doubles.plain_bytes import plain_bytes
from tests.doubles.scheduler_harness import Harness
from tests.doubles.simulation import SEED, Simulation


class Recorder:
    """Stands in for a scheduler: passes every call on, and to a twin a deep copy of it."""

    CALLS = (
        "add_request",
        "abort_request",
        "abort_all_requests",
        "release_leases",
        "flush_cache",
        "next_batch",
        "process_result",
        "fail_step",
    )

    def __init__(self, scheduler: Any, twin: Any) -> None:
        self._scheduler, self._twin = scheduler, twin
        self.num_steps = 0

    def __getattr__(self, name: str):
        method = getattr(self._scheduler, name)
        if name not in self.CALLS:
            return method

        def both(*args, **kwargs):
            sent = copy.deepcopy((args, kwargs), {id(c): c for c in kwargs.values()})
            ours, theirs = outcome(method, args, kwargs), outcome(getattr(self._twin, name), *sent)
            if name == "next_batch" and ours is not None:
                self.num_steps += 1
                assert plain_bytes(ours) == plain_bytes(theirs)
            elif isinstance(ours, Exception):
                assert str(ours) == str(theirs)
                raise ours
            return ours

        return both


def outcome(method, args, kwargs):
    try:
        return method(*args, **kwargs)
    except Exception as error:
        return error


@pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_two_schedulers_with_same_calls_decide_the_same(page_size: int, depth: int) -> None:
    """Everything that the simulation does, failing allocations left out: they would be drawn twice."""
    seed = SEED + 300 + page_size + depth
    print(f"BATON_SIM_SEED={seed}")
    options: dict[str, Any] = {"page_size": page_size, "depth": depth}
    one, other = Simulation(seed, **options), Simulation(seed, **options)
    for simulation in (one, other):
        simulation.failure_rate = 0.0
    recorder = Recorder(one.harness.scheduler, other.harness.scheduler)
    one.harness.scheduler = recorder  # pyright: ignore[reportAttributeAccessIssue]
    one.run(150)
    assert recorder.num_steps > 100


def test_request_object_in_batch_is_detected() -> None:
    harness = Harness()
    harness.add("r", [1, 2, 3], 4)
    batch = harness.scheduler.next_batch(0.0)
    assert batch is not None and plain_bytes(batch)
    batch.opened.append(harness.outcomes["r", 0].request)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Request is no plain data"):
        plain_bytes(batch)
