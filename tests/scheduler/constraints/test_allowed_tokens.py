"""Which tokens may come next, as packed bits."""

from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.constraints.constraint import AllowedTokens


def pack(rows: list[int], tokens: list[int]) -> AllowedTokens:
    return AllowedTokens.pack(np.array(rows, dtype=np.int32), np.array(tokens, dtype=np.int32))


@pytest.mark.parametrize(
    ("rows", "tokens", "words"),
    [
        ([], [], []),
        ([0], [0], [(0, 0, 1)]),
        ([0, 0, 0], [0, 31, 32], [(0, 0, 2**31 + 1), (0, 1, 1)]),
        ([0, 1, 3], [40, 40, 41], [(0, 1, 256), (1, 1, 256), (3, 1, 512)]),
    ],
)
def test_allowed_tokens_are_packed_into_words(rows: list[int], tokens: list[int], words: list[tuple[int, ...]]) -> None:
    packed = pack(rows, tokens)
    assert list(zip(packed.rows.tolist(), packed.words.tolist(), packed.bits.tolist(), strict=True)) == words
    assert (packed.rows.dtype, packed.words.dtype, packed.bits.dtype) == (np.int32, np.int32, np.uint32)
    unpacked = packed.unpack()
    assert [array.tolist() for array in unpacked] == [rows, tokens]
    assert [array.dtype for array in unpacked] == [np.int32, np.int32]


def test_join_offsets_rows_of_each_part() -> None:
    assert AllowedTokens.join([]) is None
    joined = AllowedTokens.join([(2, pack([0, 1], [5, 70])), (4, pack([], [])), (9, pack([0], [33]))])
    assert joined is not None and joined.rows.dtype == np.int32 and joined.bits.dtype == np.uint32
    assert [array.tolist() for array in joined.unpack()] == [[2, 3, 9], [5, 70, 33]]
