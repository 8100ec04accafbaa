from __future__ import annotations

from typing import Any, cast

import numpy as np

from baton.runtime.step_runner import verify_drafts
from baton.scheduler.batch import ScheduleBatch


class Step:
    """The fields that count."""

    def __init__(self, rows: list[tuple[list[int], int]]) -> None:
        """rows: input ids, and how many of the last are guesses."""
        self.input_ids = np.array([i for ids, _ in rows for i in ids], dtype=np.int32)
        self.extend_lens = np.array([len(ids) for ids, _ in rows], dtype=np.int32)
        self.draft_lens = np.array([drafted for _, drafted in rows], dtype=np.int32)


def verified(rows: list[tuple[list[int], int]], sampled: list[list[int]]) -> list[list[int]]:
    """The tokens that are taken of each row."""
    said = np.array([token for row in sampled for token in row])
    counts = np.array([len(row) for row in sampled], dtype=np.int32)
    kept, taken = verify_drafts(cast(Any, Step(rows)), said, counts)
    assert counts.tolist() == [len(row) for row in sampled], "the argument is left as it is"
    return [part.tolist() for part in np.split(said[taken], np.cumsum(kept)[:-1])]


def test_tokens_are_accepted_up_to_first_wrong_guess() -> None:
    rows = [([1, 5, 6, 7], 3)]
    assert verified(rows, [[5, 6, 7, 8]]) == [[5, 6, 7, 8]]
    assert verified(rows, [[5, 6, 9, 8]]) == [[5, 6, 9]]
    assert verified(rows, [[9, 6, 7, 8]]) == [[9]], "what is right behind a wrong guess is worth nothing"


def test_verification_of_mixed_rows() -> None:
    """Without a draft; that samples nothing; with drafts, one behind tokens that are known."""
    rows = [([4], 0), ([1, 2, 3], 0), ([1, 5], 1), ([8, 8, 8, 3, 4], 2), ([-1, 6], 1)]
    sampled = [[9], [], [5, 2], [3, 7, 1], [7, 7]]
    assert verified(rows, sampled) == [[9], [], [5, 2], [3, 7], [7]]


def test_sampled_counts_include_drafts() -> None:
    batch = cast(Any, object.__new__(ScheduleBatch))
    batch.samples = np.array([True, False, True])
    batch.draft_lens = None
    assert batch.sampled_counts.tolist() == [1, 0, 1]
    batch.draft_lens = np.array([3, 0, 0], dtype=np.int32)
    assert batch.sampled_counts.tolist() == [4, 0, 1]
