"""What is kept of open sequences, and for how long."""

from __future__ import annotations

import numpy as np
import pytest

from baton.runtime.sampling.sequences import SequenceTable
from tests.doubles.sampling_requests import make_info, make_sequence


def test_sequences_are_kept_from_open_to_close():
    table = SequenceTable()
    first, second, third = (make_info(serial=serial, seed=serial) for serial in (4, 9, 11))
    table.update_sequences([first, second], [])
    assert len(table) == 2 and table[4].info is first and not table.recording
    table[9].append([5])
    state = table[9]
    table.update_sequences([third], [4])
    assert len(table) == 2 and 4 not in table.recording and table[9] is state and table[11].info is third
    with pytest.raises(KeyError):
        table[4]


def test_closing_unknown_or_closed_sequence_is_ignored():
    table = SequenceTable()
    table.update_sequences([make_info(serial=1)], [7])
    table.update_sequences([], [1, 7])
    table.update_sequences([], [1])
    assert len(table) == 0


def test_output_is_kept_only_for_stop_strings():
    sequence = make_sequence(output=[3, 4], stop=("x",))
    sequence.append(iter([5]))
    assert sequence.output_ids.tolist() == [3, 4, 5] and sequence.output_ids.dtype == np.int32
    assert sequence.seen is None
    plain = make_sequence(output=[3, 4])
    assert plain.output_ids.tolist() == [] and plain.output_ids.dtype == np.int32 and plain.seen is None


@pytest.mark.parametrize(
    ("wish", "prompt"),
    [({"repetition_penalty": 1.2}, [1, 7]), ({"frequency_penalty": 0.5}, []), ({"presence_penalty": 0.5}, [])],
)
def test_counts_are_kept_only_for_penalties(wish, prompt):
    sequence = make_sequence(prompt=[1, 7, 7], output=[7, 9, 9], **wish)
    assert sequence.seen is not None
    counts = dict(zip(sequence.seen.ids.tolist(), sequence.seen.output_counts.tolist()))
    assert counts == {**dict.fromkeys(prompt, 0), 7: 1, 9: 2}
    assert sequence.output_ids.tolist() == []
