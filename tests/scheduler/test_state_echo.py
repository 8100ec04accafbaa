"""The recurrent states of the KV-echo model: it says what its oracle says, and a broken promise of StateRows shows.

Each row of a step has KV slots of its own here, so that states alone can be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np
import pytest

from baton.memory_pool.req_to_token import RowUpdates
from baton.scheduler.batch import BeamStep, ForwardMode, ScheduleBatch, SequenceInfo, StateRows, StepResult
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles import state_echo
from tests.doubles.kv_echo import KVEchoModel, Stage, StepFailed, expected_beams, expected_output, prompt_of

ROWS, CONTEXT, STATES = 4, 64, 8


@dataclass
class Row:
    """One row of a step. outs: (end, slot) of each state that it writes."""

    row: int
    prefix_len: int
    tokens: list[int]
    source: int
    outs: list[tuple[int, int]]
    drafts: int = 0
    """So many of the last tokens are guesses."""


def decode(row: int, prefix_len: int, token: int, source: int, target: int) -> Row:
    return Row(row, prefix_len, [token], source, [(1, target)])


def states_of(rows: list[Row]) -> StateRows:
    outs = [(place, end, slot) for place, row in enumerate(rows) for end, slot in row.outs]
    columns = np.array(outs, dtype=np.int32).reshape(-1, 3)
    sources = np.array([row.source for row in rows], dtype=np.int32)
    return StateRows(sources, *(np.ascontiguousarray(columns[:, column]) for column in range(3)))


@dataclass
class Rig:
    """Steps that are written down by hand."""

    model: KVEchoModel = field(
        default_factory=lambda: KVEchoModel(1 + ROWS * CONTEXT, ROWS, CONTEXT, num_states=STATES)
    )
    opened: set[int] = field(default_factory=set)

    def batch(self, *rows: Row) -> ScheduleBatch:
        """A step that samples in every row; row n is the sequence with serial n."""
        numbers = np.array([row.row for row in rows], dtype=np.int32)
        prefix_lens = np.array([row.prefix_len for row in rows], dtype=np.int32)
        extend_lens = np.array([len(row.tokens) for row in rows], dtype=np.int32)
        slots = [1 + row.row * CONTEXT + row.prefix_len + place for row in rows for place in range(len(row.tokens))]
        new = [row.row for row in rows if row.row not in self.opened]
        self.opened |= set(new)
        sampling = SamplingParams(temperature=0.0, max_new_tokens=8)
        return ScheduleBatch(
            step_id=1,
            mode=ForwardMode.EXTEND,
            opened=[SequenceInfo(serial, sampling, 0, None, True, np.empty(0, dtype=np.int32)) for serial in new],
            closed=[],
            serials=numbers.astype(np.int64),
            input_ids=np.array([token for row in rows for token in row.tokens], dtype=np.int32),
            out_cache_loc=np.array(slots, dtype=np.int32),
            req_pool_indices=numbers,
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
            samples=np.ones(len(rows), dtype=bool),
            output_positions=np.zeros(len(rows), dtype=np.int32),
            logprob_starts=extend_lens,
            logprob_targets=[],
            row_updates=RowUpdates(numbers, prefix_lens, extend_lens, np.array(slots, dtype=np.int32)),
            states=states_of(list(rows)),
            draft_lens=np.array([row.drafts for row in rows], dtype=np.int32),
        )

    def run(self, *rows: Row, fails_before: Stage | None = None) -> list[list[int]]:
        """The tokens that each row brings."""
        return self.model.forward(self.batch(*rows), fails_before).rows()


def prefilled(*prompts: list[int]) -> tuple[Rig, list[int]]:
    """Prompt n is in row n, its state in slot 1 + n. Returns the token that follows each, too."""
    rig = Rig()
    said = rig.run(*(Row(n, 0, prompt, 0, [(len(prompt), 1 + n)]) for n, prompt in enumerate(prompts)))
    return rig, [tokens[0] for tokens in said]


@pytest.mark.parametrize("chunk", [1, 7, 20])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "ping-pong"])
def test_chunks_and_decodes_say_what_oracle_says(chunk: int, in_place: bool) -> None:
    prompt, rig, said = prompt_of(20), Rig(), [0]
    source, target = 0, 3
    for start in range(0, 20, chunk):
        tokens = prompt[start : start + chunk]
        (said,) = rig.run(Row(2, start, tokens, source, [(len(tokens), target)]))
        source, target = target, target if in_place else 8 - target
    output = said
    for length in range(20, 26):
        (said,) = rig.run(decode(2, length, output[-1], source, target))
        source, target = target, target if in_place else 8 - target
        output = output + said
    assert output == expected_output(prompt, 7, stateful=True) != expected_output(prompt, 7)


def test_tokens_of_step_in_flight_update_state() -> None:
    prompt = prompt_of(9)
    rig, (first,) = prefilled(prompt)
    (second,) = rig.run(decode(0, 9, -1, 1, 2))  # the token that row 0 of the step before sampled
    assert [first, *second] == expected_output(prompt, 2, stateful=True)


def test_several_rows_start_from_one_state() -> None:
    prompt = prompt_of(9)
    rig, (first,) = prefilled(prompt)
    slots = rig.model._kv[1:10]
    rig.model._kv[1 + CONTEXT : 10 + CONTEXT] = slots  # row 1 has the same KV
    rig.model._mirror[1, :9] = 1 + CONTEXT + np.arange(9)
    said = rig.run(decode(0, 9, first, 1, 3), decode(1, 9, 5, 1, 4))
    assert said[0] == expected_output(prompt, 2, stateful=True)[1:]
    assert said[1] == expected_output([*prompt, 5], 1, stateful=True)


def test_inner_states_are_of_their_own_lengths() -> None:
    prompt = prompt_of(20)
    rig = Rig()
    rig.run(Row(0, 0, prompt, 0, [(4, 1), (16, 2), (20, 3)]))
    for end, slot in ((4, 1), (16, 2)):
        (said,) = rig.run(Row(0, end, [7], slot, [(1, 5)]))
        assert said == expected_output([*prompt[:end], 7], 1, stateful=True), end
        rig.run(Row(0, end, prompt[end:], slot, [(20 - end, 6)]))  # puts the KV right again


def test_drafts_are_judged_by_states_at_their_places() -> None:
    prompt = prompt_of(9)
    rig, _ = prefilled(prompt)
    right = expected_output(prompt, 5, stateful=True)
    tokens = [*right[:3], (right[3] + 1) % 20]  # two right guesses, a wrong one
    outs = [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert rig.run(Row(0, 9, tokens, 1, outs, drafts=3)) == [right[1:4]]
    assert rig.run(decode(0, 12, right[3], 4, 4)) == [right[4:]]
    assert rig.model.verified == [1, 0]


def test_state_behind_wrong_guess_shows() -> None:
    prompt = prompt_of(9)
    rig, (first,) = prefilled(prompt)
    right = expected_output(prompt, 3, stateful=True)
    rig.run(Row(0, 9, [first, right[1] + 1], 1, [(1, 2), (2, 3)], drafts=1))
    rig.run(Row(0, 10, [right[1]], 2, [(1, 4)]))  # puts the KV right
    assert rig.run(decode(0, 11, right[2], 4, 5)) == [expected_output(prompt, 4, stateful=True)[3:]]
    assert rig.run(decode(0, 11, right[2], 3, 5)) != [expected_output(prompt, 4, stateful=True)[3:]]


def test_beams_are_ranked_by_their_states() -> None:
    prompt, params = prompt_of(9), SamplingParams(temperature=0.0, max_new_tokens=1, beam_width=2, n=2)
    rig = Rig()
    batch = rig.batch(Row(0, 0, prompt, 0, [(9, 1)]))
    batch.draft_lens, batch.samples = None, np.zeros(1, dtype=bool)
    batch.beams = [BeamStep(serial=0, start=0, stop=1, num_candidates=2, scores=np.zeros(1, dtype=np.float32))]
    answer = rig.model.forward(batch).beams[0]
    assert answer is not None
    found = [result.ids.tolist() for result in expected_beams(prompt, params, stateful=True)]
    assert [[token] for token in answer.tokens.tolist()] == found
    assert found != [result.ids.tolist() for result in expected_beams(prompt, params)]


def test_state_of_other_tokens_changes_output() -> None:
    """Its length is right, so the output alone can show it."""
    rig, (first, _) = prefilled(prompt_of(9), prompt_of(9, seed=1))
    right = expected_output(prompt_of(9), 2, stateful=True)[1:]
    assert rig.run(decode(0, 9, first, 1, 3)) == [right]
    assert rig.run(decode(0, 9, first, 2, 3)) != [right]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        pytest.param(decode(0, 9, 1, 2, 1), None, "has the state of 7", id="state of another length"),
        pytest.param(decode(0, 9, 1, 8, 1), None, "has the state of -1", id="slot that was never written"),
        pytest.param(decode(0, 9, 1, 0, 1), None, "if, and only if", id="prefix without a source"),
        pytest.param(Row(2, 0, [1], 1, [(1, 3)]), None, "if, and only if", id="source without a prefix"),
        pytest.param(decode(0, 9, 1, 1, 3), decode(1, 7, 1, 2, 3), "written twice", id="slot written twice"),
        pytest.param(decode(0, 9, 1, 1, 2), decode(1, 7, 1, 2, 3), r"rows \[1\] read", id="row writes what next reads"),
        pytest.param(decode(0, 9, 1, 1, 3), decode(1, 7, 1, 2, 1), r"rows \[0\] read", id="row writes what other read"),
        pytest.param(decode(0, 9, 1, 1, 0), None, "no slots", id="zeros written"),
        pytest.param(decode(0, 9, 1, 1, STATES + 1), None, "no slots", id="slot beyond the pool"),
        pytest.param(decode(0, 9, 1, STATES + 1, 1), None, "no slots", id="source beyond the pool"),
        pytest.param(decode(0, 9, 1, -1, 1), None, "no slots", id="negative source"),
        pytest.param(Row(0, 9, [1, 2], 1, [(1, 3)]), None, "last ends", id="last token left out"),
        pytest.param(Row(0, 9, [1, 2], 1, [(3, 3)]), None, "last ends", id="end beyond the row"),
        pytest.param(Row(0, 9, [1, 2], 1, [(2, 3), (1, 4)]), None, "out of order", id="ends that descend"),
        pytest.param(Row(0, 9, [1, 2], 1, [(2, 3), (2, 4)]), None, "out of order", id="end twice"),
        pytest.param(Row(0, 9, [1, 2], 1, [(0, 3), (2, 4)]), None, "no new token", id="state of no new token"),
        pytest.param(Row(0, 9, [1], 1, []), None, "writes no state", id="row without a state"),
        pytest.param(decode(0, 9, 1, 1, 3), Row(1, 7, [1], 2, []), "writes no state", id="last row without a state"),
    ],
)
def test_broken_promise_is_caught(first: Row, second: Row | None, message: str) -> None:
    rig, _ = prefilled(prompt_of(9), prompt_of(7))
    with pytest.raises(AssertionError, match=message):
        rig.run(*(row for row in (first, second) if row is not None))


def test_rows_out_of_order_and_other_dtypes_are_caught() -> None:
    rig, _ = prefilled(prompt_of(9), prompt_of(7))
    batch = rig.batch(decode(0, 9, 1, 1, 3), decode(1, 7, 1, 2, 4))
    assert batch.states is not None
    good = batch.states
    for broken, message in (
        (replace(good, rows=good.rows[::-1]), "out of order"),
        (replace(good, sources=good.sources.astype(np.int64)), "int32"),
        (replace(good, ends=good.ends[:1]), "int32"),
        (replace(good, slots=good.slots.astype(np.int64)), "int32"),
        (None, "no states"),
    ):
        batch.states = broken
        with pytest.raises(AssertionError, match=message):
            rig.model.forward(batch)


def test_step_that_is_computed_twice_in_place_is_caught() -> None:
    """The second run would add its token again."""
    rig, (first,) = prefilled(prompt_of(9))
    rig.run(decode(0, 9, first, 1, 1))
    with pytest.raises(AssertionError, match="has the state of 10"):
        rig.run(decode(0, 9, first, 1, 1))


def test_slot_that_was_given_to_another_row_is_caught() -> None:
    rig, (first, other) = prefilled(prompt_of(9), prompt_of(7))
    rig.run(decode(1, 7, other, 2, 1))
    with pytest.raises(AssertionError, match="has the state of 8"):
        rig.run(decode(0, 9, first, 1, 3))


def test_states_are_refused_for_model_without_them() -> None:
    rig = Rig(KVEchoModel(1 + ROWS * CONTEXT, ROWS, CONTEXT))
    with pytest.raises(AssertionError, match="without states"):
        rig.run(Row(0, 0, [1], 0, [(1, 1)]))


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "elsewhere"])
@pytest.mark.parametrize("stage", [stage for stage in get_args(Stage) if stage != "finish"])
def test_step_that_fails_at_launch_loses_what_it_was_to_write(stage: Stage, in_place: bool) -> None:
    """A state that it only read is still there."""
    prompt = prompt_of(9)
    rig, (first,) = prefilled(prompt)
    with pytest.raises(StepFailed):
        rig.run(decode(0, 9, first, 1, 1 if in_place else 2), fails_before=stage)
    with pytest.raises(AssertionError, match="has the state of -1"):
        rig.run(decode(0, 10, first, 1 if in_place else 2, 3))
    if not in_place:
        assert rig.run(decode(0, 9, first, 1, 3)) == [expected_output(prompt, 2, stateful=True)[1:]]


def test_only_step_in_flight_reads_what_failed_step_lost() -> None:
    """It was launched before the failure was known. What it says is wrong, and what it wrote is lost too."""
    prompt = prompt_of(9)
    rig, (first,) = prefilled(prompt)
    right = expected_output(prompt, 3, stateful=True)
    with pytest.raises(StepFailed):
        rig.run(decode(0, 9, first, 1, 2), fails_before="finish")
    assert rig.run(decode(0, 10, right[1], 2, 3)) != [right[2:]]
    for source, length in ((2, 10), (3, 11)):
        with pytest.raises(AssertionError, match="has the state of -1"):
            rig.run(decode(0, length, right[1], source, 4))


def test_state_that_is_not_finite_spoils_what_follows() -> None:
    prompt = prompt_of(9)
    rig, (first,) = prefilled(prompt)
    rig.model.spoiling = {first}
    assert failed_rows(rig, decode(0, 9, first, 1, 2)) == {0: 9}
    rig.model.spoiling = set()
    rig.model._kv[1 : 1 + CONTEXT] = 17  # whatever the KV is
    assert rig.model.states.hashes[2] == state_echo.SPOILED
    assert failed_rows(rig, decode(0, 10, 1, 2, 3)) == {0: 0}, "no prefix of a spoiled state can be trusted"
    assert failed_rows(rig, decode(0, 11, 1, 3, 3)) == {0: 0}


def failed_rows(rig: Rig, row: Row) -> dict[int, int]:
    result: StepResult = rig.model.forward(rig.batch(row))
    return result.failed_rows
