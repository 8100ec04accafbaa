"""How far a burst goes."""

from __future__ import annotations

from typing import ClassVar

import pytest

from baton.entrypoints.simulate.burst import RowAhead, burst_ends
from baton.entrypoints.simulate.cost_model import Linear, StepSize
from tests.doubles.simulated import SECOND

FAR = float("inf")


def test_burst_runs_to_the_longest_row_or_the_limit() -> None:
    rows = [RowAhead(2, 10, FAR), RowAhead(4, 10, FAR)]
    assert burst_ends(rows, SECOND, 5.0, FAR, 16, False) == [6.0, 7.0, 8.0, 9.0]
    assert burst_ends(rows, SECOND, 5.0, FAR, 3, False) == [6.0, 7.0, 8.0]


def test_burst_stops_at_the_step_of_the_next_event() -> None:
    rows = [RowAhead(9, 10, FAR)]
    assert burst_ends(rows, SECOND, 5.0, 6.5, 16, False) == [6.0, 7.0]
    assert burst_ends(rows, SECOND, 5.0, 5.5, 16, False) == [6.0]


def test_burst_stops_at_the_first_finished_row_if_requests_wait() -> None:
    rows = [RowAhead(2, 10, FAR), RowAhead(4, 10, FAR)]
    assert burst_ends(rows, SECOND, 0.0, FAR, 16, True) == [1.0, 2.0]


def test_burst_stops_when_a_finished_row_may_return() -> None:
    rows = [RowAhead(2, 10, 0.5), RowAhead(9, 10, FAR)]
    assert burst_ends(rows, SECOND, 0.0, FAR, 16, False) == [1.0, 2.0, 3.0]


def test_finished_rows_add_no_cost_to_a_burst() -> None:
    """By hand: contexts 10 and 20, one token more each step; the first row leaves after its second token."""
    cost = Linear(fixed_s=1.0, prompt_token_s=0.0, decode_row_s=0.1, context_token_s=0.01)
    steps = [1 + 0.2 + 0.30, 1 + 0.2 + 0.32, 1 + 0.1 + 0.22, 1 + 0.1 + 0.23]
    ends = burst_ends([RowAhead(2, 10, FAR), RowAhead(4, 20, FAR)], cost, 0.0, FAR, 16, False)
    assert ends == pytest.approx([sum(steps[: n + 1]) for n in range(4)])


def test_layers_with_a_window_see_no_more_in_a_burst() -> None:
    """By hand: a window of 11 tokens; of contexts 10 and 20, the first grows into it, and leaves after two tokens."""

    class Windows:
        layers, window = 1, 11
        seen: ClassVar[list[int]] = []

        def step_s(self, step: StepSize) -> float:
            assert step.window_attended == step.window_context
            self.seen.append(step.window_context)
            return 1.0

        def load_s(self, tokens: int, states: int = 0) -> float:
            return 0.0

        store_s = load_s

    burst_ends([RowAhead(2, 10, FAR), RowAhead(4, 20, FAR)], Windows(), 0.0, FAR, 16, False)
    assert Windows.seen == [10 + 11, 11 + 11, 11, 11]
