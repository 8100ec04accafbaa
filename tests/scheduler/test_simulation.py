"""The whole scheduler, driven from one seed: random arrivals, shared prefixes, aborts, pressure, failing allocations.

Whatever happens, every request ends exactly once, says what the model says without any cache, and no slot is lost.
"""

from __future__ import annotations

import os
import random

import pytest
from kv_echo import VOCAB, expected_output
from scheduler_harness import Harness

SEED = int(os.environ.get("BATON_SIM_SEED", "20"))


def random_prompt(rng: random.Random, stems: list[list[int]], longest: int) -> list[int]:
    """A few shared stems, cut at random, and a tail of its own: splits at every kind of place."""
    prompt = rng.choice(stems)[: rng.randrange(0, 90)] + [rng.randrange(20) for _ in range(rng.randrange(1, 40))]
    return prompt[:longest]


def simulate(seed: int, *, steps: int, **options) -> None:
    rng = random.Random(seed)
    eos = (3,)
    context = 256
    harness = Harness(
        num_tokens=rng.choice([320, 384, 640]),
        rows=rng.choice([3, 8]),
        chunk=rng.choice([1, 7, 32, 64, 500]),
        context=context,
        eos=eos,
        **options,
    )
    failure_rate = rng.choice([0.0, 0.0, 0.1])
    harness.allocator.should_fail = lambda call: rng.random() < failure_rate
    stems = [[rng.randrange(VOCAB) for _ in range(90)] for _ in range(3)]
    prompts: dict[str, tuple[list[int], int, int, bool]] = {}
    aborted: set[str] = set()
    for number in range(steps):
        if rng.random() < 0.3 and len(harness.scheduler.live_requests) < 24:
            rid = f"r{number}"
            prompt = random_prompt(rng, stems, 200)
            new, n, ignore = rng.randrange(1, 40), rng.choice([1, 1, 1, 3]), rng.random() < 0.5
            prompts[rid] = (prompt, new, n, ignore)
            harness.add(rid, prompt, new, n=n, ignore_eos=ignore, namespace=rng.choice(["", "", "salt"]))
        if rng.random() < 0.03 and prompts:
            rid = rng.choice(list(prompts))
            if any(r.rid == rid for r in harness.scheduler.live_requests):
                aborted.add(rid)
            harness.abort(rid)
        if rng.random() < 0.01:
            harness.scheduler.flush_cache()
        harness.step()
    failure_rate = 0.0
    harness.run()
    for (rid, _), outcome in harness.outcomes.items():
        prompt, new, _, ignore = prompts[rid]
        expected = expected_output(prompt, new, frozenset() if ignore else frozenset(eos))
        assert outcome.finish is not None
        if outcome.finish.type == "abort":
            assert rid in aborted
            assert outcome.tokens == expected[: len(outcome.tokens)]
        else:
            assert outcome.tokens == expected, (rid, prompt)
    stats = harness.scheduler.stats()
    assert stats.free_tokens + stats.evictable_tokens == stats.total_tokens
    assert stats.protected_tokens == stats.private_tokens == 0
    assert harness.pool.num_free == harness.config.max_running_requests


@pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("offset", range(4))
def test_simulation(page_size: int, depth: int, offset: int) -> None:
    seed = SEED + offset
    print(f"BATON_SIM_SEED={seed}")
    policy = "lpm" if offset % 2 else "fcfs"
    simulate(seed, steps=400, page_size=page_size, depth=depth, policy=policy)


@pytest.mark.parametrize("page_size", [1, 16])
def test_simulation_without_radix_cache(page_size: int) -> None:
    simulate(SEED, steps=300, page_size=page_size, disable_radix_cache=True)


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(200))
def test_simulation_soak(offset: int) -> None:
    rng = random.Random(SEED + offset)
    simulate(
        SEED + 1000 + offset,
        steps=1500,
        page_size=rng.choice([1, 2, 16, 64]),
        depth=rng.choice([1, 2]),
        policy=rng.choice(["fcfs", "lpm"]),
        disable_radix_cache=rng.random() < 0.1,
    )
