"""Outputs of a few token ids only."""

from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.constraints.allowed_ids import AllowedIds
from baton.scheduler.outcome import RequestRefused
from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import Harness

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])


def test_each_step_allows_the_same_distinct_ids() -> None:
    constraint = AllowedIds([70, 3, 70, 32])
    state = constraint.start()
    later = state.advance(np.array([3], dtype=np.int32)).select(np.array([0]))
    for each in (state, later):
        rows, tokens = each.allowed().unpack()
        assert (rows.tolist(), tokens.tolist()) == ([0, 0, 0], [3, 32, 70])
        assert each.num_allowed().tolist() == [3] and each.at_end().tolist() == [False] and len(each) == 1


@DEPTHS
@pytest.mark.parametrize("page_size", [1, 16])
def test_outputs_contain_only_allowed_ids(page_size: int, depth: int) -> None:
    harness = Harness(num_tokens=128, page_size=page_size, depth=depth)
    for i in range(4):
        harness.add(f"few{i}", prompt_of(20, i), 30, allowed_token_ids=(5, 9, 11))
        harness.add(f"all{i}", prompt_of(20, i), 30)
    harness.run()
    assert harness.scheduler.stats().retractions > 0, "under pressure too"
    for i in range(4):
        few, free = harness.outcomes[f"few{i}", 0].tokens, harness.outcomes[f"all{i}", 0].tokens
        assert len(few) == 30 and set(few) <= {5, 9, 11} and not set(free) <= {5, 9, 11}
    assert len({token for i in range(4) for token in harness.outcomes[f"few{i}", 0].tokens}) == 3


@DEPTHS
def test_unlimited_output_of_allowed_ids_fills_context(depth: int) -> None:
    harness = Harness(depth=depth, context=64)
    harness.add("a", prompt_of(20), None, allowed_token_ids=(5,))
    harness.run()
    assert harness.outcomes["a", 0].tokens == [5] * 44


@DEPTHS
def test_allowed_eos_ends_output(depth: int) -> None:
    harness = Harness(depth=depth, eos=(7,))
    harness.add("ends", prompt_of(20), 9, allowed_token_ids=(7,))
    harness.add("goes on", prompt_of(20), 9, allowed_token_ids=(8,))
    harness.run()
    assert harness.outcomes["ends", 0].tokens == [7] and harness.outcomes["goes on", 0].tokens == [8] * 9


def test_min_new_tokens_with_only_end_ids_allowed_is_refused() -> None:
    harness = Harness(eos=(7,))
    with pytest.raises(RequestRefused, match="min_new_tokens is 2, but each of allowed_token_ids ends") as refused:
        harness.add("a", prompt_of(20), 9, allowed_token_ids=(7, 8), stop_token_ids=(8,), min_new_tokens=2)
    assert refused.value.param == "min_new_tokens"
    harness.add("b", prompt_of(20), 9, allowed_token_ids=(7, 8), min_new_tokens=2)
    harness.add("c", prompt_of(20), 9, allowed_token_ids=(7,), ignore_eos=True, min_new_tokens=2)
    harness.run()
    assert harness.outcomes["c", 0].tokens == [7] * 9
