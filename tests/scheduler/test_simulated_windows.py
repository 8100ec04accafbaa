"""The whole scheduler on a model with sliding windows in a pool of their own, driven from one seed (see
doubles/simulation.py).

The pool is as small as it can be. The KV-echo model reads what each token sees from there, and a slot that was given
back too early changes the output. In the end every slot is free again.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton.scheduler.policies.registry import POLICIES
from tests.doubles.drafting import draft_by_echo
from tests.doubles.simulation import SEED, Simulation, simulate
from tests.scheduler.test_simulated_states import KINDS

CASES = pytest.mark.parametrize(
    ("page_size", "depth", "window"), [(1, 1, 8), (1, 2, 33), (16, 1, 20), (16, 2, 1), (64, 1, 70), (64, 2, 16)]
)


@CASES
def test_simulation(page_size: int, depth: int, window: int) -> None:
    offset = page_size + depth + window
    policy = sorted(POLICIES)[offset % len(POLICIES)]
    simulate(SEED + 2500 + offset, steps=150, page_size=page_size, depth=depth, window=window, policy=policy)


@CASES
def test_simulation_of_failing_steps(page_size: int, depth: int, window: int) -> None:
    options: dict[str, Any] = {"page_size": page_size, "depth": depth, "window": window}
    assert simulate(SEED + 2540, steps=120, faults=True, **options).harness.failed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("page_size", "depth", "window"), [(1, 1, 8), (16, 2, 20)])
def test_simulation_of_each_kind(kind: str, page_size: int, depth: int, window: int) -> None:
    simulate(SEED + 2580, steps=120, page_size=page_size, depth=depth, window=window, **KINDS[kind])


@pytest.mark.parametrize(("page_size", "depth", "window"), [(1, 1, 8), (1, 2, 33), (16, 2, 20)])
def test_simulation_of_followers(page_size: int, depth: int, window: int) -> None:
    """Block events name what a prompt can use, also after steps that fail."""
    options: dict[str, Any] = {"page_size": page_size, "depth": depth, "window": window}
    follower = simulate(SEED + 2640, steps=100, follow=True, faults=depth == 2, check_every=10, **options).follower
    assert follower is not None and follower.of_no_use > 5


@CASES
def test_simulation_of_drafts(page_size: int, depth: int, window: int) -> None:
    print(f"BATON_SIM_SEED={SEED}")
    options: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 7, "window": window}
    simulation = Simulation(SEED + 2620, page_size=page_size, depth=depth, **options)
    draft_by_echo(simulation.harness.scheduler._speculation, random.Random(SEED + 9), 0.6, reach=window)
    simulation.run(120)
    assert sum(simulation.harness.model.verified) > 3


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(100))
def test_soak(offset: int) -> None:
    rng = random.Random(SEED + offset)
    options: dict[str, Any] = KINDS[rng.choice(list(KINDS))] | {"faults": rng.random() < 0.5}
    options |= {"page_size": rng.choice([1, 2, 16, 64]), "depth": rng.choice([1, 2]), "window": rng.choice([1, 7, 30])}
    simulate(SEED + 2700 + offset, steps=600, **options)
