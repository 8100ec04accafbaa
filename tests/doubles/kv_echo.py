"""A fake model that proves where KV went.

Its "KV" of a token is a hash of the token and of the KV *read back* at the position before, through the device mirror
of req_to_token; its next token is a hash over the KV of the whole sequence, read back the same way. One wrong slot, one
page freed too early, one bad split, and the output differs from `expected_output`, which needs no KV at all.
"""

from __future__ import annotations

import numpy as np

from baton.scheduler.batch import ScheduleBatch, StepResult

VOCAB = 1000
_MULTIPLIER, _INCREMENT, _MASK = 6364136223846793005, 1442695040888963407, 2**64 - 1
_START = 7


def _mix(state: int, token: int) -> int:
    return ((state ^ (token + 1)) * _MULTIPLIER + _INCREMENT) & _MASK


def _next_token(kv: np.ndarray) -> int:
    with np.errstate(over="ignore"):
        weights = np.arange(1, 2 * len(kv), 2, dtype=np.uint64)
        return int((kv * weights).sum() >> np.uint64(33)) % VOCAB


def expected_output(prompt: list[int], num_tokens: int, end_ids: frozenset[int] = frozenset()) -> list[int]:
    """What the model says after ``prompt``: the oracle, computed from the tokens alone."""
    state: int = _START
    kv: list[int] = []
    for token in prompt:
        state = _mix(state, token)
        kv.append(state)
    output: list[int] = []
    while len(output) < num_tokens:
        token = _next_token(np.array(kv, dtype=np.uint64))
        output.append(token)
        if token in end_ids:
            break
        state = _mix(state, token)
        kv.append(state)
    return output


class KVEchoModel:
    """Computes ScheduleBatches on ``num_slots`` slots (padding included). Reads rows only through its own mirror."""

    def __init__(self, num_slots: int, num_rows: int, max_context: int) -> None:
        self._kv = np.zeros(num_slots, dtype=np.uint64)
        self._mirror = np.zeros((num_rows, max_context), dtype=np.int32)
        self._last_next_ids = np.zeros(0, dtype=np.int32)
        self.computed_tokens = 0

    def forward(self, batch: ScheduleBatch) -> StepResult:
        updates = batch.row_updates
        self._mirror.reshape(-1)[updates.flat_index(self._mirror.shape[1])] = updates.values
        self._kv[batch.copies.target] = self._kv[batch.copies.source]
        next_ids = np.full(len(batch), -1, dtype=np.int32)
        start = 0
        for i, (row, old, new) in enumerate(
            zip(batch.req_pool_indices.tolist(), batch.prefix_lens.tolist(), batch.extend_lens.tolist())
        ):
            slots = batch.out_cache_loc[start : start + new]
            assert (slots > 0).all(), "the padding slot was handed out"
            assert np.array_equal(slots, self._mirror[row, old : old + new]), "row and out_cache_loc disagree"
            state = int(self._kv[self._mirror[row, old - 1]]) if old else _START
            for slot, token in zip(slots.tolist(), batch.input_ids[start : start + new].tolist()):
                if token < 0:
                    token = int(self._last_next_ids[-token - 1])
                    assert token >= 0, "a placeholder names a row that sampled nothing"
                state = _mix(state, token)
                self._kv[slot] = state
            if batch.samples[i]:
                next_ids[i] = _next_token(self._kv[self._mirror[row, : old + new]])
            start += new
        self.computed_tokens += start
        self._last_next_ids = next_ids
        return StepResult(next_ids=next_ids)
