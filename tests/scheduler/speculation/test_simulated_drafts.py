"""The whole scheduler, driven from one seed, with drafts that are right, wrong, or right for some tokens.

Every request says what it says without speculation, no slot is lost, and the tree never has a wrong guess: the KV-echo
model would say something else behind it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.doubles.drafting import EchoDrafter, draft_by_echo
from tests.doubles.scheduler_harness import PAGES
from tests.doubles.simulation import SEED, Simulation

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])


def simulate(seed: int, *, steps: int, right: float, **options: Any) -> tuple[Simulation, EchoDrafter]:
    print(f"BATON_SIM_SEED={seed}")
    simulation = Simulation(seed, speculative_algorithm="NGRAM", speculative_num_draft_tokens=7, **options)
    drafter = draft_by_echo(simulation.harness.scheduler._speculation, random.Random(seed + 9), right)
    simulation.run(steps)
    return simulation, drafter


@PAGES
@DEPTHS
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_speculation_changes_no_output(page_size: int, depth: int, right: float) -> None:
    simulation, drafter = simulate(SEED + 700, steps=150, right=right, page_size=page_size, depth=depth)
    wrong, whole = simulation.harness.model.verified
    counts = simulation.harness.scheduler._speculation.counts
    assert drafter.drafts > 50 and counts.verified > 30
    assert wrong > 10 or right == 1.0
    assert whole > 10 or right == 0.0
    assert counts.accepted <= counts.drafted


@PAGES
@DEPTHS
def test_speculation_with_failing_steps(page_size: int, depth: int) -> None:
    simulation, _ = simulate(SEED + 710, steps=120, right=0.6, page_size=page_size, depth=depth, faults=True)
    assert simulation.harness.failed


@PAGES
def test_speculation_with_tiers_and_mixed_steps(page_size: int) -> None:
    options: dict[str, Any] = {"host_ratio": 1.0, "block_tokens": max(8, page_size), "enable_mixed_chunk": True}
    simulation, _ = simulate(SEED + 720, steps=100, right=0.6, page_size=page_size, depth=2, **options)
    assert simulation.mixed > 5 and min(simulation.harness.model.verified) > 5


def test_speculation_with_retraction_under_pressure() -> None:
    retractions = 0
    for offset in range(4):
        simulation, _ = simulate(SEED + 730 + offset, steps=150, right=0.5, page_size=16, policy="lpm")
        retractions += simulation.harness.scheduler.stats().retractions
    assert retractions > 3


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(100))
def test_soak(offset: int) -> None:
    rng = random.Random(SEED + offset)
    options: dict[str, Any] = {"page_size": rng.choice([1, 2, 16, 64]), "depth": rng.choice([1, 2])}
    options |= {"faults": rng.random() < 0.3, "jobs": rng.random() < 0.3, "host_ratio": rng.choice([0.0, 1.0])}
    simulate(SEED + 1700 + offset, steps=600, right=rng.random(), **options)
