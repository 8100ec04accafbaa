"""Slow twins: Python sets of tokens, and loops over rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from baton.runtime.sampling.mask_ops import LARGEST_ALLOWED
from baton.runtime.sampling.token_masks import allow_only
from baton.scheduler.constraints.constraint import AllowedTokens
from tests.doubles.sampling_requests import allow

Pairs = list[tuple[int, int]]


def random_pairs(rng: np.random.Generator, rows: int, vocab_size: int) -> Pairs:
    """Some rows have none; some have all."""
    shares = rng.choice([0.0, 0.01, 0.3, 1.0], (rows, 1))
    return [(int(row), int(token)) for row, token in zip(*(rng.random((rows, vocab_size)) < shares).nonzero())]


def pack(pairs: Pairs) -> AllowedTokens:
    rows, tokens = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
    return AllowedTokens.pack(rows, tokens)


def unpack(allowed: AllowedTokens) -> Pairs:
    rows, tokens = allowed.unpack()
    assert rows.dtype == tokens.dtype == np.int32
    return list(zip(rows.tolist(), tokens.tolist()))


def slow_words(pairs: Pairs) -> dict[tuple[int, int], int]:
    """(row, word) -> bits, of words with a bit, in ascending order."""
    words: dict[tuple[int, int], int] = {}
    for row, token in pairs:
        words[row, token // 32] = words.get((row, token // 32), 0) | 1 << token % 32
    return dict(sorted(words.items()))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_token_mask_pack_and_unpack_round_trip(seed, vocab_size):
    rng = np.random.default_rng([seed, vocab_size])
    pairs = random_pairs(rng, int(rng.integers(1, 9)), vocab_size)
    allowed = pack(pairs)
    assert (allowed.rows.dtype, allowed.words.dtype, allowed.bits.dtype) == (np.int32, np.int32, np.uint32)
    words = slow_words(pairs)
    assert list(zip(allowed.rows.tolist(), allowed.words.tolist())) == list(words)
    assert allowed.bits.tolist() == list(words.values())
    assert unpack(allowed) == pairs


@pytest.mark.parametrize("seed", range(6))
def test_join_keeps_pairs_of_all_parts_in_their_rows(seed):
    rng = np.random.default_rng(seed)
    parts, expected, first = [], [], 0
    for _ in range(int(rng.integers(1, 7))):
        first += int(rng.integers(0, 3))  # rows without a constraint lie between
        rows = int(rng.integers(1, 5))
        pairs = random_pairs(rng, rows, 100)
        parts.append((first, pack(pairs)))
        expected += [(first + row, token) for row, token in pairs]
        first += rows
    joined = AllowedTokens.join(parts)
    assert joined is not None and unpack(joined) == expected
    assert (joined.rows.dtype, joined.words.dtype, joined.bits.dtype) == (np.int32, np.int32, np.uint32)


def test_empty_token_masks():
    assert unpack(pack([])) == [] and AllowedTokens.join([]) is None
    joined = AllowedTokens.join([(0, pack([])), (3, pack([(1, 40)])), (9, pack([]))])
    assert joined is not None and unpack(joined) == [(4, 40)]


def slow_allow_only(logits: torch.Tensor, pairs: Pairs, *, finite: bool) -> torch.Tensor:
    """A loop over every logit."""
    expected, allowed = logits.clone(), set(pairs)
    for row in {row for row, _ in pairs}:
        for token in range(logits.shape[1]):
            value = logits[row, token].item()
            if (row, token) not in allowed:
                expected[row, token] = -math.inf
            elif finite:
                low = -LARGEST_ALLOWED
                expected[row, token] = low if math.isnan(value) else min(max(value, low), LARGEST_ALLOWED)
    return expected


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_only_allowed_tokens_keep_their_logits(seed, finite):
    """Rows that are not named keep all. Logits that are NaN or infinite are among them."""
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.choice([7, 64, 200]))
    logits = torch.from_numpy(rng.normal(size=(6, vocab_size)).astype(np.float32))
    broken = torch.tensor([math.nan, math.inf, -math.inf, 3e38])
    where = torch.from_numpy(rng.random((6, vocab_size)) < 0.2)
    logits[where] = broken[torch.from_numpy(rng.integers(0, 4, int(where.sum())))]
    pairs = random_pairs(rng, 6, vocab_size)
    expected = slow_allow_only(logits, pairs, finite=finite)
    allow_only(logits, pack(pairs), finite=finite)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)


def test_empty_token_mask_changes_no_logits():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    allow_only(logits, allow({}))
    assert torch.equal(logits, before)
