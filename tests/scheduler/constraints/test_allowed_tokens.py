"""Which tokens may come next, as packed bits."""

from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.constraints.constraint import AllowedTokens, TokenMasks


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


def test_split_gives_each_row_alone_and_join_puts_them_together() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        count = int(rng.integers(1, 7))
        pairs = np.argwhere(rng.random((count, 100)) < rng.choice([0.0, 0.05, 0.5], (count, 1))).astype(np.int32)
        whole = AllowedTokens.pack(*pairs.T)
        parts = whole.split(count)
        for row, part in enumerate(parts):
            assert [array.tolist() for array in part.unpack()] == [
                [0] * int((pairs[:, 0] == row).sum()),
                pairs[pairs[:, 0] == row, 1].tolist(),
            ]
        joined = AllowedTokens.join(list(enumerate(parts)))
        assert joined is not None
        for name in ("rows", "words", "bits"):
            assert np.array_equal(getattr(joined, name), getattr(whole, name)), name


def test_joined_masks_are_those_of_their_parts() -> None:
    """Parts with arrays of their own, and parts that share one."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        arrays = [rng.integers(0, 2**32, (int(rng.integers(1, 4)), 3), dtype=np.uint32) for _ in range(3)]
        parts, first = [], int(rng.integers(0, 3))
        for array in rng.choice(3, 4):
            count = int(rng.integers(1, 4))
            mask_of = rng.integers(0, len(arrays[array]), count).astype(np.int32)
            parts.append((first, TokenMasks(np.arange(count, dtype=np.int32), mask_of, arrays[array])))
            first += count + int(rng.integers(0, 2))
        joined = TokenMasks.join(parts)
        assert joined is not None and joined.rows.dtype == joined.mask_of.dtype == np.int32
        expected = [
            (first + row, mask) for first, part in parts for row, mask in zip(part.rows, part.masks[part.mask_of])
        ]
        assert joined.rows.tolist() == [row for row, _ in expected]
        assert np.array_equal(joined.masks[joined.mask_of], [mask for _, mask in expected])
        distinct = {id(part.masks): len(part.masks) for _, part in parts}
        assert len(joined.masks) == sum(distinct.values())
