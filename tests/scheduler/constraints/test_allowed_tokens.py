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


def test_merge_puts_rows_in_order() -> None:
    """Parts about rows that alternate, some of them with masks."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        count = int(rng.integers(1, 7))
        allowed = rng.random((count, 96)) < rng.choice([0.0, 0.05, 0.5], (count, 1))
        kinds = rng.integers(0, 4, count)
        parts = []
        for kind in rng.permutation(4).tolist():
            rows = np.flatnonzero(kinds == kind).astype(np.int32)
            if kind == 3 and len(rows):
                masks = np.packbits(allowed[rows], axis=1, bitorder="little").view("<u4")
                parts.append(AllowedTokens.of_masks(TokenMasks(rows, np.arange(len(rows), dtype=np.int32), masks)))
            elif kind < 3:
                own, tokens = np.nonzero(allowed[rows])
                parts.append(AllowedTokens.pack(rows[own], tokens.astype(np.int32)))
        merged = AllowedTokens.merge(parts)
        assert merged is not None
        assert np.array_equal(np.transpose(merged.unpack()), np.argwhere(allowed))
        assert [np.diff(part).min(initial=0) for part in (merged.rows, merged.named_rows())] == [0, 0]
        rows, tokens = np.divmod(np.arange(allowed.size), allowed.shape[1])
        assert np.array_equal(merged.holds(rows, tokens), allowed.ravel())


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
        joined = TokenMasks.merge([TokenMasks(part.rows + first, part.mask_of, part.masks) for first, part in parts])
        assert joined is not None and joined.mask_of.dtype == np.int32
        expected = [
            (first + row, mask) for first, part in parts for row, mask in zip(part.rows, part.masks[part.mask_of])
        ]
        assert joined.rows.tolist() == [row for row, _ in expected]
        assert np.array_equal(joined.masks[joined.mask_of], [mask for _, mask in expected])
        distinct = {id(part.masks): len(part.masks) for _, part in parts}
        assert len(joined.masks) == sum(distinct.values())
