"""Verifies drafts: keeps the samples of a step that follow from tokens really sampled."""

from __future__ import annotations

import numpy as np

from ..batch import ScheduleBatch


def verify(batch: ScheduleBatch, sampled: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Take the samples of each row up to the first that was not guessed; those computed behind it are invalid.

    sampled: int [n], the tokens sampled, row after row; counts: int32 [bs], how many of each row, one more than its
    guesses. Returns int32 [bs], how many are taken of each, and bool [n], which.
    """
    assert batch.draft_lens is not None
    kept, taken = counts.copy(), np.ones(len(sampled), dtype=bool)
    ends, token_ends = np.cumsum(counts), np.cumsum(batch.extend_lens)
    for row in np.flatnonzero((batch.draft_lens > 0) & (counts > 0)).tolist():
        drafted, end, token_end = int(batch.draft_lens[row]), int(ends[row]), int(token_ends[row])
        start = end - drafted - 1
        wrong = np.flatnonzero(sampled[start : end - 1] != batch.input_ids[token_end - drafted : token_end])
        if len(wrong):
            kept[row] = wrong[0] + 1
            taken[start + kept[row] : end] = False
    return kept, taken
