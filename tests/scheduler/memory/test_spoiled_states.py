"""Recurrent states that are not finite: requests that start from one fail once, and nothing starts from it again."""

from __future__ import annotations

import numpy as np
import pytest

from tests.doubles import state_echo
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])
STEM = prompt_of(128)


def served(page_size: int, depth: int, ttl: float = 0.0) -> Harness:
    """A prompt that fills whole pages has been computed, and its state is in the tree."""
    harness = Harness(num_tokens=2048, page_size=page_size, depth=depth, states=16)
    harness.add("first", STEM, 1, retain_ttl=ttl, state_points=(len(STEM),))
    harness.run()
    assert [node.prefix_len for node in states_of(harness).nodes()] == [128]
    return harness


def states_of(harness: Harness):
    assert harness.cache.states is not None
    return harness.cache.states


def spoil(harness: Harness) -> None:
    """All states that are held."""
    assert harness.slots is not None
    harness.model.states.hashes[np.flatnonzero(harness.slots.refs)] = state_echo.SPOILED


def refusal_of(harness: Harness, rid: str) -> str | None:
    refusal = harness.outcomes[rid, 0].refusal
    return None if refusal is None else refusal.code


@PAGES
@DEPTHS
def test_spoiled_state_of_node_fails_one_request_only(page_size: int, depth: int) -> None:
    harness = served(page_size, depth)
    spoil(harness)
    harness.add("found", [*STEM, 1, 2], 5)
    harness.run()
    assert refusal_of(harness, "found") == "logits_not_finite"
    assert not len(states_of(harness)), "the spoiled state is in the tree"
    for rid in ("next", "last"):
        harness.add(rid, [*STEM, 1, 2], 5)
        harness.run()
        assert harness.outcomes[rid, 0].tokens == expected_output([*STEM, 1, 2], 5, stateful=True)
    assert harness.slots is not None and harness.slots.quarantined == 0


@PAGES
@DEPTHS
def test_spoiled_state_of_lease_fails_its_child_only(page_size: int, depth: int) -> None:
    harness = served(page_size, depth, ttl=1000.0)
    spoil(harness)
    harness.continue_from("first", "child", [3], 4)
    harness.run()
    assert refusal_of(harness, "child") == "logits_not_finite"
    harness.add("next", STEM, 5)
    harness.run()
    assert harness.outcomes["next", 0].tokens == expected_output(STEM, 5, stateful=True)


@DEPTHS
def test_running_request_with_states_of_its_own_keeps_running(depth: int) -> None:
    """It began from the state before it was spoiled. What it leaves in the tree, nothing finds there."""
    harness = served(16, depth)
    harness.add("running", [*STEM, 5], 30)
    for _ in range(4):
        harness.step()
    (node,) = states_of(harness).nodes()
    harness.model.states.hashes[node.state] = state_echo.SPOILED
    harness.add("found", [*STEM, 6], 5)
    harness.run()
    assert refusal_of(harness, "found") == "logits_not_finite"
    assert harness.outcomes["running", 0].tokens == expected_output([*STEM, 5], 30, stateful=True)
    harness.add("next", [*STEM, 6], 5)
    harness.run()
    assert harness.outcomes["next", 0].tokens == expected_output([*STEM, 6], 5, stateful=True)
