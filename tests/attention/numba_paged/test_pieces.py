"""How a step is cut: every key that a token sees belongs to one piece, and no piece is far too much work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.attention.backend import AttentionBatch, Reach, SharedPrefix
from baton.attention.numba_paged import pieces
from baton.attention.numba_paged.pieces import Work, cut

CONTEXT = 4096


def step(lengths: list[tuple[int, int]], shared: list[SharedPrefix] | None = None) -> AttentionBatch:
    return AttentionBatch(
        torch.zeros(len(lengths) + 1, CONTEXT, dtype=torch.int32),
        np.arange(len(lengths), dtype=np.int32),
        np.array([prefix for prefix, _ in lengths], dtype=np.int32),
        np.array([new for _, new in lengths], dtype=np.int32),
        len(lengths),
        shared or [],
    )


def seen_by(work: Work, head: int) -> dict[int, list[int]]:
    """Keys of each token, as the kernel goes through them."""
    found: dict[int, list[int]] = {}
    for first, last, low, high, its_head, own, _, _ in work.pieces.tolist():
        for token in range(first, last):
            if its_head == head:
                keys = range(max(low, int(work.begins[token])), min(high, int(work.ends[token])))
                found.setdefault(token, []).extend(keys)
            if not own:
                assert work.rows[token] == work.rows[first] or high <= CONTEXT
    return found


def check(work: Work, batch: AttentionBatch, members: np.ndarray, reach: Reach, kv_heads: int, parts: int = 1) -> None:
    expected: dict[int, list[int]] = {}
    token = 0
    for member, prefix, new in zip(members.tolist(), batch.prefix_lens.tolist(), batch.extend_lens.tolist()):
        for position in range(prefix, prefix + new):
            if member:
                low = 0 if reach.window is None else max(0, position - reach.window + 1)
                low = low if reach.chunk is None else max(low, position - position % reach.chunk)
                expected |= {token + part: list(range(low, position + 1)) for part in range(parts)}
            token += parts
    for head in range(kv_heads):
        found = seen_by(work, head)
        assert {token: sorted(keys) for token, keys in found.items()} == expected
    places = np.zeros(work.partial_tokens, dtype=int)
    alone: list[tuple[int, int]] = []
    for number, (first, last, _, _, head, _, partial, group) in enumerate(work.pieces.tolist()):
        assert (partial < 0) == (group < 0)
        if group < 0:
            alone += [(token, head) for token in range(first, last)]
        else:
            places[partial : partial + last - first] += 1
            start, stop, begin, end = work.groups[group].tolist()
            assert start <= number < stop and begin <= first and last <= end
    assert (places == 1).all(), "each partial sum has a place of its own"
    assert len(set(alone)) == len(alone), "what is written at once is written by one piece"


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_each_key_belongs_to_exactly_one_piece(data: Any) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 300), st.sampled_from([0, 1, 1, 1, 2, 5, 40])), max_size=8))
    shared = []
    if data.draw(st.booleans()):
        count, length = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 200))
        shared = [SharedPrefix(len(lengths), count, length)]
        lengths = lengths + [(length + data.draw(st.integers(0, 9)), 1)] * count
    members = np.array([data.draw(st.booleans()) for _ in lengths], dtype=bool)
    for group in shared:
        members[group.first : group.first + group.count] = True
    reach = Reach(*(data.draw(st.sampled_from([None, 1, 16, 100])) for _ in range(2)))
    kv_heads, threads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "LEAST_WORK", data.draw(st.sampled_from([1, 50, 10_000])))
        patch.setattr(pieces, "PART_KEYS", data.draw(st.sampled_from([1, 16, 256])))
        patch.setattr(pieces, "TOKENS_AT_ONCE", data.draw(st.sampled_from([1, 7, 64])))
        batch = step(lengths, shared)
        parts = data.draw(st.sampled_from([1, 1, 2, 5]))
        check(cut(batch, members, shared, reach, kv_heads, threads, parts), batch, members, reach, kv_heads, parts)


def work_of(work: Work) -> list[int]:
    return [
        sum(min(high, int(work.ends[t])) - max(low, int(work.begins[t])) for t in range(first, last))
        for first, last, low, high, *_ in work.pieces.tolist()
    ]


@pytest.mark.parametrize("threads", [2, 8, 64])
@pytest.mark.parametrize(
    "lengths", [[(4000, 1)], [(1000, 1)] * 32, [(4000, 1), *[(10, 1)] * 60], [(3000, 30)]], ids=str
)
def test_work_per_piece_is_bounded(lengths: list[tuple[int, int]], threads: int) -> None:
    work = cut(step(lengths), np.ones(len(lengths), dtype=bool), [], Reach(), 4, threads)
    most = max(work_of(work))
    least = max(3 * pieces.LEAST_WORK, pieces.PART_KEYS * max(new for _, new in lengths))
    assert most <= max(2.5 * work.cost / (threads * pieces.PIECES_PER_THREAD), least)


def test_small_steps_are_cut_into_few_pieces() -> None:
    work = cut(step([(20, 1)] * 64), np.ones(64, dtype=bool), [], Reach(), 2, 8)
    assert len(work.pieces) <= 2 * (64 * 37 // pieces.LEAST_WORK + 1) and not len(work.groups)


def test_single_thread_needs_no_partial_results() -> None:
    work = cut(step([(3000, 1), (2000, 5)]), np.ones(2, dtype=bool), [], Reach(), 2, 1)
    assert len(work.pieces) == 4 and work.partial_tokens == 0
