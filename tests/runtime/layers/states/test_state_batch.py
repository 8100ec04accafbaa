"""A step's states, cut into segments and waves: compared with a plain walk through rows and tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.memory_pool.state_pool import StatePool, StateTensor
from baton.runtime.layers.states.state_batch import StateBatch, StatePlanner, plan_states, row_segments, start_states
from baton.scheduler.batch import StateRows

NUM_STATES = 60
Row = tuple[int, list[int], bool]
"""New tokens, those after which a state is written (the last one not among them), True if it starts from nothing."""


def pool() -> StatePool:
    return StatePool(NUM_STATES, [{"recurrent": StateTensor((1,), torch.int64)}], torch.device("cpu"))


@st.composite
def rows(draw: st.DrawFn) -> Row:
    length = draw(st.integers(1, 12))
    inner = draw(st.sets(st.integers(1, length - 1), max_size=4)) if length > 1 else set()
    return length, sorted(inner), draw(st.booleans())


def state_rows(given_rows: list[Row], in_place: bool, seed: int) -> tuple[StateRows, np.ndarray]:
    """Each row's own slots; in place: its last target is its source."""
    slots = iter(np.random.default_rng(seed).permutation(NUM_STATES) + 1)
    sources, numbers, ends, targets = [], [], [], []
    for number, (length, inner, begins) in enumerate(given_rows):
        sources.append(0 if begins else next(slots))
        for end in (*inner, length):
            numbers.append(number)
            ends.append(end)
            targets.append(sources[-1] if in_place and end == length and not begins else next(slots))
    arrays = (np.array(values, dtype=np.int32) for values in (sources, numbers, ends, targets))
    return StateRows(*arrays), np.array([length for length, *_ in given_rows], dtype=np.int32)


def walk(states: StateRows, lens: np.ndarray, tokens: list[int], before: list[int]) -> list[int]:
    """The states of all slots after the step: of each the hash of its tokens."""
    after, start = list(before), 0
    for row, length in enumerate(lens.tolist()):
        value = before[states.sources[row]]
        written = {int(end): int(slot) for r, end, slot in zip(states.rows, states.ends, states.slots) if r == row}
        for number in range(1, length + 1):
            value = hash((value, tokens[start + number - 1])) % 2**40
            if number in written:
                after[written[number]] = value
        start += length
    return after


def compute(batch: StateBatch, tokens: list[int]) -> None:
    """As layers do it, wave after wave."""
    states = batch.pool.layers[0]["recurrent"]
    for wave in batch.waves:
        values = states.index_select(0, wave.sources).flatten().tolist()
        for number, (start, stop) in enumerate(zip(wave.starts.tolist(), wave.stops.tolist(), strict=True)):
            assert wave.begins[number] == (int(wave.sources[number]) == 0)
            for token in tokens[start:stop]:
                values[number] = hash((values[number], token)) % 2**40
        states.index_copy_(0, wave.targets, torch.tensor(values)[:, None])


@given(st.lists(rows(), min_size=1, max_size=8), st.booleans(), st.integers(0, 1000))
def test_waves_compute_what_a_walk_through_the_rows_does(given_rows: list[Row], in_place: bool, seed: int) -> None:
    states, lens = state_rows(given_rows, in_place, seed)
    tokens = np.random.default_rng(seed).integers(0, 50, int(lens.sum())).tolist()
    states_pool = pool()
    values = states_pool.layers[0]["recurrent"]
    values[1:, 0] = torch.arange(1, NUM_STATES + 2) * 1000
    expected = walk(states, lens, tokens, values[:, 0].tolist())
    batch = plan_states(states_pool, states, lens)
    assert len(batch.waves) == max(len(inner) + 1 for _, inner, _ in given_rows)
    for wave in batch.waves:
        assert (np.diff(wave.starts) > 0).all() and (wave.stops > wave.starts).all()
        assert wave.is_single == all(stop - start == 1 for start, stop in zip(wave.starts, wave.stops))
    compute(batch, tokens)
    assert values[:, 0].tolist() == expected and expected[0] == 0


@given(st.lists(rows(), min_size=1, max_size=8), st.booleans(), st.integers(0, 1000))
def test_segments_of_rows_are_numbered_by_tokens(given_rows: list[Row], in_place: bool, seed: int) -> None:
    states, lens = state_rows(given_rows, in_place, seed)
    segments = row_segments(states, lens)
    found, first = [], 0
    for row, last in enumerate(segments.segment_ends.tolist()):
        start = int(segments.token_ends[row]) - int(lens[row])
        found.append([end - start for end in segments.ends[first:last].tolist()])
        first = last
    assert found == [[*inner, length] for length, inner, _ in given_rows]
    assert segments.targets.tolist() == states.slots.tolist() and first == len(states.slots)
    assert segments.sources.tolist() == states.sources.tolist()


def test_trial_steps_start_from_nothing_and_write_trash() -> None:
    (wave,) = start_states(pool(), [4, 1]).waves
    assert wave.sources.tolist() == [0, 0] and wave.targets.tolist() == [NUM_STATES + 1] * 2
    assert wave.starts.tolist() == [0, 4] and wave.stops.tolist() == [4, 5] and wave.begins.all()


def test_repeated_rows_are_planned_once() -> None:
    """Two steps in turn; what is equal is not the same."""
    planner, (lens, other) = StatePlanner(pool()), (np.ones(2, dtype=np.int32), np.array([3, 1], dtype=np.int32))
    first, second, equal = (state_rows([(1, [], False)] * 2, in_place=True, seed=seed)[0] for seed in (1, 2, 1))
    batches = [planner.plan_states(rows, lens) for rows in (first, second, first, second)]
    assert batches[0] is batches[2] and batches[1] is batches[3] and batches[0] is not batches[1]
    assert batches[0].rows.targets.tolist() == first.slots.tolist()
    assert planner.plan_states(equal, lens) is not batches[0]
    longer = StateRows(first.sources, first.rows, other, first.slots)
    assert planner.plan_states(longer, other).rows.token_ends.tolist() == [3, 4]
    assert planner.plan_states(first, lens).rows.token_ends.tolist() == [1, 2]
