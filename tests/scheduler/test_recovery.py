"""Exceptions at every call of the scheduler: the request at fault ends, the others say what they would have said, and
no slot, row, lock or lease is lost."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from fault_injection import CallFaults, inject
from simulation import SEED, Simulation

START = int(os.environ.get("BATON_FAULT_SEED", "7"))
KINDS: list[dict[str, Any]] = [
    {"page_size": 1},
    {"page_size": 16, "depth": 2},
    {"page_size": 64, "jobs": True, "policy": "handoff"},
    {"page_size": 1, "depth": 2, "host_ratio": 2.0, "jobs": True, "policy": "continuum"},
    {"page_size": 16, "host_ratio": 1.0, "block_tokens": 16},
    {"page_size": 1, "enable_mixed_chunk": True, "policy": "lpm", "unwanted": 0.5},
    {"page_size": 16, "depth": 2, "speculative_algorithm": "NGRAM"},
]
STEPS = 40


def run(kind: int, seed: int, at: int) -> tuple[CallFaults, Simulation]:
    """A simulation in which call number ``at`` fails; -1: none does."""
    faults = CallFaults(at)
    simulation = Simulation(seed, **KINDS[kind])
    inject(simulation.harness, faults)
    simulation.run(STEPS)
    return faults, simulation


def check_one(kind: int, seed: int, at: int) -> int:
    """Returns how many requests the fault ended."""
    print(f"kind {kind}, seed {seed}, call {at}")
    faults, simulation = run(kind, seed, at)
    if faults.place is not None:
        print("failed", faults.place)
    return len(simulation.hit)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_any_call_may_fail(kind: int) -> None:
    """Some calls of a run, drawn from one seed; the slow test takes many more."""
    rng = random.Random(START + kind)
    calls = run(kind, SEED + kind, -1)[0].calls
    assert calls > 3000
    hit = [check_one(kind, SEED + kind, rng.randrange(calls)) for _ in range(8)]
    assert sorted(hit)[len(hit) // 2] <= 2, "most faults end one request at most, or a few of one family"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_every_call_may_fail(kind: int) -> None:
    """Every call of a part of the code at least once: the first, middle and last call of each function, and a sample of
    the others."""
    rng = random.Random(START + 100 + kind)
    for offset in range(3):
        seed = SEED + 10 * kind + offset
        calls = run(kind, seed, -1)[0].calls
        for at in sorted(rng.sample(range(calls), min(calls, 400))):
            check_one(kind, seed, at)
