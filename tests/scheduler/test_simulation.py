"""The whole scheduler, driven from one seed (see doubles/simulation.py).

Whatever happens, every request ends exactly once, says what the model says without any cache, and no slot is lost.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton.radix.tiers.host_tier import HostPolicy
from baton.scheduler.jobs.job import MAX_STEPS
from baton.scheduler.policies.registry import POLICIES
from tests.doubles.combinations import product
from tests.doubles.simulation import SEED, Simulation, simulate
from tests.doubles.tier_rig import FakeBlocks

PAGE_SIZES, DEPTHS = (1, 16, 64), (1, 2)


@product("offset, page_size, depth", range(4), PAGE_SIZES, DEPTHS)
def test_simulation(page_size: int, depth: int, offset: int) -> None:
    policy = sorted(POLICIES)[offset % len(POLICIES)]
    simulate(SEED + offset, steps=300, page_size=page_size, depth=depth, policy=policy)


@product("offset, page_size, depth", range(3), PAGE_SIZES, DEPTHS)
def test_simulation_of_failing_steps(page_size: int, depth: int, offset: int) -> None:
    policy = sorted(POLICIES)[offset % len(POLICIES)]
    simulation = simulate(SEED + 100 + offset, steps=150, page_size=page_size, depth=depth, policy=policy, faults=True)
    assert simulation.harness.failed


@product("page_size, depth, faults", PAGE_SIZES, DEPTHS, (False, True))
def test_simulation_of_mixed_steps(page_size: int, depth: int, faults: bool) -> None:
    policy = "lpm" if faults else "fcfs"
    options: dict[str, Any] = {"page_size": page_size, "depth": depth, "policy": policy, "faults": faults}
    simulation = simulate(220, steps=200, enable_mixed_chunk=True, **options)
    assert simulation.mixed > 10


@product("policy, page_size, faults", sorted(POLICIES), PAGE_SIZES, (True, False))
def test_simulation_of_jobs(policy: str, page_size: int, faults: bool) -> None:
    options: dict[str, Any] = {"page_size": page_size, "policy": policy, "faults": faults}
    offset = sorted(POLICIES).index(policy)
    simulation = simulate(
        SEED + 600 + offset, steps=200, jobs=True, depth=1 + faults, host_ratio=2.0 * faults, max_jobs=8, **options
    )
    assert simulation.harness.scheduler.stats().jobs.jobs > 3


@pytest.mark.parametrize("policy", ["fcfs", "handoff"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_simulation_of_unnamed_jobs(policy: str, page_size: int) -> None:
    """Turns name neither their job nor the turn that they extend."""
    options: dict[str, Any] = {"page_size": page_size, "policy": policy, "max_recognized_turns": 40, "check_every": 3}
    found = [
        simulate(SEED + 900, steps=400, next_turns=0.95, jobs=jobs, **options).recognized for jobs in (False, True)
    ]
    assert sum(found) > 0


@pytest.mark.parametrize("host_ratio", [0.0, 2.0], ids=["device", "host"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_simulation_of_no_reuse_requests(page_size: int, host_ratio: float) -> None:
    simulate(SEED + 800, steps=300, page_size=page_size, host_ratio=host_ratio, unwanted=0.5, faults=True)


@pytest.mark.parametrize("faults", [False, True], ids=["sound", "faults"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_simulation_of_preparations(page_size: int, faults: bool) -> None:
    steps = used = 0
    for depth in (1, 2):
        for offset in range(2):
            options: dict[str, Any] = {"page_size": page_size, "depth": depth, "faults": faults, "policy": "handoff"}
            options |= {"jobs": True, "prepares": True, "host_ratio": 2.0 * faults}
            stats = simulate(SEED + 903 + offset, steps=300, **options).harness.scheduler.stats().preparations
            steps, used = steps + stats.steps, used + stats.used_tokens
    assert steps and (used or faults), (steps, used)


@pytest.mark.parametrize(("page_size", "depth", "faults"), [(1, 1, False), (16, 2, False), (4, 2, True)])
def test_simulation_of_adapters(page_size: int, depth: int, faults: bool) -> None:
    """Continuations, jobs, turns that name nothing, preparations and a host tier, half of it with adapters."""
    options: dict[str, Any] = {"page_size": page_size, "depth": depth, "faults": faults, "host_ratio": 1.0}
    used, prepared = set[str](), 0
    for offset in range(4):
        jobs = {"jobs": True, "prepares": True, "next_turns": 0.6, "policy": "handoff"}
        simulation = simulate(SEED + 950 + offset, steps=250, adapters=True, **jobs, **options)
        used |= set(simulation.adapter_of.values())
        prepared += simulation.harness.scheduler.stats().preparations.steps
    assert used == {"", "a", "b"} and (prepared or faults), (used, prepared)


def test_simulation_takes_every_path() -> None:
    """Some are rare; a few seeds bring them all."""
    missing = {"handoff", "fork", "match", "handoff of the turn before", "match of the turn before"}
    searches = offset = 0
    while offset < 3 or (missing and offset < 20):
        simulation = simulate(SEED + 50 + offset, steps=200, page_size=16)
        missing -= simulation.paths
        searches += simulation.searches
        offset += 1
    assert not missing and searches > 10


@pytest.mark.parametrize("page_size", [1, 16])
def test_simulation_without_radix_cache(page_size: int) -> None:
    simulate(SEED, steps=300, page_size=page_size, disable_radix_cache=True)


@product("offset, page_size, depth, faults", range(2), PAGE_SIZES, DEPTHS, (False, True))
def test_simulation_with_a_host_tier(page_size: int, depth: int, faults: bool, offset: int) -> None:
    """Copies end late and in any order, and fail; the host is smaller or larger than the device."""
    ratio = [1.0, 4.0][offset]
    simulation = simulate(
        SEED + 300 + offset, steps=150, page_size=page_size, depth=depth, faults=faults, host_ratio=ratio
    )
    assert simulation.harness.tiers is not None
    counts = simulation.harness.tiers.host.counts
    assert counts.stored and (counts.failed_stores == 0 or faults), counts
    assert counts.loaded or ratio == 1.0 or page_size == 64, counts


def test_simulation_of_parents_loaded_from_host() -> None:
    assert "tier" in simulate(321, steps=100, host_ratio=4.0).paths


@product("policy, page_size, faults", (HostPolicy(write_back=True), HostPolicy(min_hits=1)), PAGE_SIZES, (False, True))
def test_simulation_with_lazily_storing_host_tier(policy: HostPolicy, page_size: int, faults: bool) -> None:
    depth = 2 if faults else 1
    simulation = simulate(
        SEED + 300, steps=100, page_size=page_size, depth=depth, faults=faults, host_ratio=3.0, host_policy=policy
    )
    assert simulation.harness.tiers is not None and simulation.harness.tiers.host.counts.stored


@product("page_size, depth, faults", PAGE_SIZES, DEPTHS, (False, True))
def test_simulation_with_a_disk_tier(page_size: int, depth: int, faults: bool) -> None:
    """The second run finds on disk what the first has left there; or with a new disk, in the remote store."""
    options: dict[str, Any] = {"page_size": page_size, "depth": depth, "faults": faults, "host_ratio": 1.0}
    options["block_tokens"] = max(8, page_size)
    adopted = 0
    for offset in range(1 if page_size == 64 else 4):
        first = simulate(SEED + 400 + offset, steps=60, **options).harness.tiers
        assert first is not None and all(tier.counts.written for tier in first.stores)
        assert first.blocks.touched and first.far.touched
        blocks = (first.blocks, first.far) if depth == 1 else (FakeBlocks(), first.far)
        again = simulate(SEED + 400 + offset, steps=60, blocks=blocks, **options).harness.tiers
        assert again is not None and again.disk is not None and again.remote is not None
        adopted += (again.disk.counts if depth == 1 else again.remote.counts).adopted
        if adopted:
            return
    assert page_size == 64, "no seed found what had been left"


@pytest.mark.parametrize("faults", [False, True], ids=["sound", "faults"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_simulation_of_ragged_steps_with_tiers(page_size: int, faults: bool) -> None:
    """A row brings one to four tokens; none goes to the tree or below before its KV is computed."""
    options: dict[str, Any] = {"page_size": page_size, "faults": faults, "host_ratio": 1.0, "guesses": 3}
    simulation = simulate(SEED + 500, steps=120, block_tokens=max(8, page_size), **options)
    assert simulation.harness.tiers is not None and simulation.harness.tiers.host.counts.stored


def test_write_back_may_displace_prefix_about_to_be_loaded() -> None:
    policy = HostPolicy(write_back=True)
    simulate(6072, steps=200, page_size=2, depth=2, policy="lpm", host_ratio=0.5, host_policy=policy)


def test_lease_is_copied_while_its_own_copies_are_pending() -> None:
    """A lease is copied in the step in which its own slots are, while the slots they come from have been reused."""
    simulate(1072, steps=400, page_size=1, policy="lpm")


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(200))
def test_simulation_soak(offset: int) -> None:
    rng = random.Random(SEED + offset)
    simulate(
        SEED + 1000 + offset,
        steps=1500,
        page_size=rng.choice([1, 2, 16, 64]),
        depth=rng.choice([1, 2]),
        policy=rng.choice(sorted(POLICIES)),
        disable_radix_cache=rng.random() < 0.1,
        faults=rng.random() < 0.5,
        enable_mixed_chunk=rng.random() < 0.3,
        jobs=offset % 4 == 3,
        prepares=offset % 4 == 3,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", ["handoff", "continuum"])
def test_simulation_of_10_000_jobs(policy: str) -> None:
    """Mixed traffic, ids used again, prompts that leave what was said, leaps of the clock: nothing piles up."""
    print(f"BATON_SIM_SEED={SEED}")
    options: dict[str, Any] = {"policy": policy, "max_jobs": 64, "page_size": 16, "host_ratio": 2.0}
    simulation = Simulation(SEED + 700, jobs=True, new_jobs=0.9, **options)
    while simulation.num_jobs < 10_000:
        simulation.run(5000)  # each ends with nothing open, and all answers checked
    pins = simulation.harness.scheduler._pins
    assert len(pins._table) <= 64 and len(pins._table._by_rid) <= 64 * MAX_STEPS
    assert not pins._pins and not pins._ending and not pins._pinned_at_arrival
    assert pins.stats().hits and pins.stats().broken


@product("page_size, depth, faults", PAGE_SIZES, DEPTHS, (False, True))
def test_simulation_of_pooled_prompts(page_size: int, depth: int, faults: bool) -> None:
    """Beside searches, continuations, turns that they extend, and a host tier."""
    offset = PAGE_SIZES.index(page_size) + 3 * depth + 6 * faults
    policy = sorted(POLICIES)[offset % len(POLICIES)]
    options: dict[str, Any] = {"page_size": page_size, "depth": depth, "policy": policy, "faults": faults}
    simulation = simulate(
        SEED + 1300 + offset, steps=300, pooled=0.5, jobs=True, host_ratio=2.0 * faults,
        enable_mixed_chunk=not faults, **options,
    )  # fmt: skip
    assert simulation.num_pooled > 4
