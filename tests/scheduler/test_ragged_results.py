"""A row of a step may bring several tokens (speculation and jump-forward will), and they count up to the first end."""

from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.batch import ScheduleBatch, StepResult, StopMatch
from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.request import RequestEvent
from tests.doubles.scheduler_harness import PAGES, Harness


def step(harness: Harness, *rows: list[int], stops: dict[int, StopMatch] | None = None) -> list[RequestEvent]:
    """One step that brings these tokens."""
    batch = harness.scheduler.next_batch(0.0)
    assert batch is not None and len(batch) == len(rows)
    result = StepResult.of_rows(rows)
    result.stop_matches.update(stops or {})
    events = harness.scheduler.process_result(result, 0.0)
    harness.verify()
    return events


def next_batch(harness: Harness) -> ScheduleBatch:
    batch = harness.scheduler.next_batch(0.0)
    assert batch is not None
    return batch


def test_step_result_rows_and_counts() -> None:
    result = StepResult.of_rows([[4, 5], [], [6]])
    assert result.token_ids.tolist() == [4, 5, 6] and result.counts.tolist() == [2, 0, 1]
    assert result.rows() == [[4, 5], [], [6]]


@PAGES
def test_all_tokens_of_ragged_row_are_taken_then_computed(page_size: int) -> None:
    """Their KV is computed before the next token is sampled."""
    harness = Harness(page_size=page_size)
    harness.add("r", [1, 2, 3], 8)
    (event,) = step(harness, [10, 11, 12])
    assert event.token_ids == (10, 11, 12) and event.finish is None
    inputs = []
    while True:
        batch = next_batch(harness)
        inputs += batch.input_ids.tolist()
        if batch.samples[0]:
            break
        assert harness.scheduler.process_result(StepResult.of_rows([[]]), 0.0) == []
        harness.verify()
    assert inputs == [10, 11, 12]
    assert batch.output_positions.tolist() == [3]
    assert batch.seq_lens.tolist() == [6]


@pytest.mark.parametrize(
    ("sampling", "tokens", "stops", "taken", "matched"),
    [
        ({"stop_token_ids": (7,)}, [5, 7, 9], {}, (5, 7), 7),
        ({"stop": ("x", "y")}, [5, 6, 9], {0: StopMatch(1, 1, token=1)}, (5, 6), "y"),
        ({}, [5, 6, 9, 9, 9], {}, (5, 6, 9, 9), None),  # max_new_tokens
        ({"stop_token_ids": (7,), "min_new_tokens": 2}, [7, 7, 7], {}, (7, 7, 7), 7),
    ],
    ids=["stop id", "stop string", "length", "not before the minimum"],
)
def test_tokens_after_an_end_are_ignored(sampling, tokens, stops, taken, matched) -> None:
    harness = Harness()
    harness.add("r", [1, 2, 3], 4, **sampling)
    (event,) = step(harness, tokens, stops=stops)
    assert event.token_ids == taken
    assert event.finish is not None and event.finish.matched == matched
    assert harness.scheduler.is_idle


def test_constraint_advances_with_every_token() -> None:
    trie = ItemTrie.build(np.array([[4, 5, 6], [4, 5, 7]], dtype=np.int32))
    harness = Harness()
    harness.add("r", [1, 2, 3], trie=trie)
    (event,) = step(harness, [4, 5])
    assert event.finish is None
    step(harness, [])
    batch = next_batch(harness)
    assert batch.allowed is not None
    assert [array.tolist() for array in batch.allowed.unpack()] == [[0, 0], [6, 7]]
    (event,) = harness.scheduler.process_result(StepResult.of_rows([[7, 9]]), 0.0)
    assert event.token_ids == (7,) and event.finish is not None and event.finish.matched == "item"


def test_child_inherits_only_taken_tokens() -> None:
    harness = Harness()
    harness.add("parent", [1, 2, 3], 4, stop_token_ids=(7,))
    step(harness, [5, 7, 9])
    harness.continue_from("parent", "child", [8], 2)
    child = harness.outcomes["child", 0].request
    assert child is not None and child.token_ids.view().tolist() == [1, 2, 3, 5, 8]
