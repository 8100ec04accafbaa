"""The whole scheduler on a model with recurrent states, driven from one seed (see doubles/simulation.py).

The KV-echo model checks which states each step reads and writes, and one that is lost, stale or updated twice changes
the output. In the end every slot is free again.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton.radix.tiers.host_tier import HostPolicy
from baton.scheduler.policies.registry import POLICIES
from tests.doubles.combinations import product
from tests.doubles.drafting import draft_by_echo
from tests.doubles.simulation import SEED, Simulation, simulate
from tests.doubles.tier_rig import FakeBlocks

CASES = pytest.mark.parametrize(
    ("page_size", "depth", "states"), [(1, 1, 4), (1, 2, 64), (16, 1, 64), (16, 2, 2), (64, 1, 3), (64, 2, 8)]
)

KINDS: dict[str, dict[str, Any]] = {
    "mixed": {"enable_mixed_chunk": True},
    "jobs": {"jobs": True, "policy": "continuum", "clients": True},
    "preparations": {"jobs": True, "prepares": True, "policy": "handoff", "next_turns": 0.8},
    "adapters": {"adapters": True, "policy": "lpm"},
    "pooled": {"pooled": 0.4},
    "unwanted": {"unwanted": 0.4, "faults": True},
    "no cache": {"disable_radix_cache": True},
}


@CASES
def test_simulation(page_size: int, depth: int, states: int) -> None:
    offset = page_size + depth + states
    policy = sorted(POLICIES)[offset % len(POLICIES)]
    simulate(SEED + 1500 + offset, steps=150, page_size=page_size, depth=depth, states=states, policy=policy)


@CASES
def test_simulation_of_failing_steps(page_size: int, depth: int, states: int) -> None:
    options: dict[str, Any] = {"page_size": page_size, "depth": depth, "states": states}
    assert simulate(SEED + 1540, steps=120, faults=True, **options).harness.failed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("page_size", "depth", "states"), [(1, 1, 5), (16, 2, 64)])
def test_simulation_of_each_kind(kind: str, page_size: int, depth: int, states: int) -> None:
    simulate(SEED + 1580, steps=120, page_size=page_size, depth=depth, states=states, **KINDS[kind])


POLICIES_OF_HOST = {
    "write-through": HostPolicy(),
    "selective": HostPolicy(min_hits=1),
    "write-back": HostPolicy(write_back=True),
}


@product("policy, page_size, states", POLICIES_OF_HOST, (1, 16, 64), (3, 64))
def test_simulation_with_a_host_tier(policy: str, page_size: int, states: int) -> None:
    """Copies that end in any order, and fail."""
    depth = 1 if states == 3 else 2
    options: dict[str, Any] = {"page_size": page_size, "depth": depth, "states": states, "faults": depth == 2}
    seed = SEED + 1660 + page_size + states
    host = simulate(seed, steps=150, host_ratio=2.0, host_policy=POLICIES_OF_HOST[policy], **options).harness.tiers
    assert host is not None and host.host.counts.stored_states > 0


@CASES
def test_simulation_of_what_returns_from_the_host(page_size: int, depth: int, states: int) -> None:
    """Few states on the device, and many on the host."""
    simulation = Simulation(SEED + 1700, page_size=page_size, depth=depth, states=6, host_ratio=8.0, next_turns=0.9)
    simulation.run(150)
    assert simulation.harness.tiers is not None
    counts = simulation.harness.tiers.host.counts
    assert counts.loaded_states > 0, counts


@CASES
@pytest.mark.parametrize("faults", [False, True], ids=["sound", "faults"])
def test_simulation_with_a_disk_tier(faults: bool, page_size: int, depth: int, states: int) -> None:
    """The second run finds on disk what the first has left there; or with a new disk, in the remote store."""
    options: dict[str, Any] = {"page_size": page_size, "depth": depth, "states": states, "faults": faults}
    options |= {"block_tokens": max(8, page_size), "host_ratio": 3.0, "next_turns": 0.8}
    loaded = 0
    for offset in range(1 if page_size == 64 else 4):
        seed = SEED + 1720 + page_size + states + offset
        first = simulate(seed, steps=80, **options).harness.tiers
        assert first is not None and all(tier.counts.stored_states for tier in first.stores)
        blocks = (first.blocks, first.far) if depth == 1 else (FakeBlocks(), first.far)
        again = simulate(seed, steps=80, blocks=blocks, **options).harness.tiers
        assert again is not None and again.disk is not None and again.remote is not None
        loaded += (again.disk.counts if depth == 1 else again.remote.counts).loaded_states
        if loaded:
            return
    assert page_size == 64, "no seed found what had been left"


@pytest.mark.parametrize(("page_size", "depth", "states"), [(1, 1, 4), (1, 2, 8), (16, 2, 3)])
def test_simulation_of_followers(page_size: int, depth: int, states: int) -> None:
    """Block events name what a prompt can use, on both tiers, also after steps that fail."""
    options: dict[str, Any] = {"page_size": page_size, "depth": depth, "states": states, "host_ratio": 2.0}
    follower = simulate(SEED + 1760, steps=100, follow=True, faults=depth == 2, check_every=10, **options).follower
    assert follower is not None and follower.of_no_use > 5


@CASES
def test_simulation_of_drafts(page_size: int, depth: int, states: int) -> None:
    print(f"BATON_SIM_SEED={SEED}")
    options: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 7, "states": states}
    simulation = Simulation(SEED + 1620, page_size=page_size, depth=depth, **options)
    draft_by_echo(simulation.harness.scheduler._speculation, random.Random(SEED + 9), 0.6, stateful=True)
    simulation.run(120)
    assert sum(simulation.harness.model.verified) > 3 or states < 4


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(100))
def test_soak(offset: int) -> None:
    rng = random.Random(SEED + offset)
    options: dict[str, Any] = KINDS[rng.choice(list(KINDS))] | {"faults": rng.random() < 0.5}
    options |= {
        "page_size": rng.choice([1, 2, 16, 64]),
        "depth": rng.choice([1, 2]),
        "states": rng.choice([2, 3, 5, 8, 64]),
    }
    simulate(SEED + 1700 + offset, steps=600, **options)
