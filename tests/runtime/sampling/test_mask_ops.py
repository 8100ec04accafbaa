"""Whole masks of the vocabulary: the host's, the device's and Triton's ways against a loop over every logit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from baton.runtime.sampling.mask_ops import LARGEST_ALLOWED, apply_masks_on_device, apply_masks_on_host
from baton.runtime.sampling.numba_masks import apply_masks as apply_masks_by_numba
from baton.scheduler.constraints.constraint import AllowedTokens, TokenMasks

BROKEN = torch.tensor([math.nan, math.inf, -math.inf, 3e38])


def random_masks(rng: np.random.Generator, rows: int, vocab_size: int, words: int | None = None) -> TokenMasks:
    """Masks of some of the rows; several rows share one."""
    named = np.flatnonzero(rng.random(rows) < 0.7).astype(np.int32)
    if not len(named):
        named = np.array([rows - 1], dtype=np.int32)
    shares = rng.choice([0.0, 0.1, 0.9, 1.0], (3, 1))
    bits = rng.random((3, 32 * (words or -(-vocab_size // 32)))) < shares
    packed = np.packbits(bits, axis=1, bitorder="little").view("<u4")
    return TokenMasks(named, rng.integers(0, 3, len(named)).astype(np.int32), packed)


def is_allowed(masks: TokenMasks, place: int, token: int) -> bool:
    mask = masks.masks[masks.mask_of[place]]
    return token // 32 < len(mask) and bool(int(mask[token // 32]) >> token % 32 & 1)


def slow_apply(logits: torch.Tensor, masks: TokenMasks, *, finite: bool) -> torch.Tensor:
    expected, low = logits.clone(), -LARGEST_ALLOWED
    for place, row in enumerate(masks.rows.tolist()):
        for token in range(logits.shape[1]):
            value = logits[row, token].item()
            if not is_allowed(masks, place, token):
                expected[row, token] = -math.inf
            elif finite:
                expected[row, token] = low if math.isnan(value) else min(max(value, low), LARGEST_ALLOWED)
    return expected


def random_logits(rng: np.random.Generator, rows: int, vocab_size: int) -> torch.Tensor:
    logits = torch.from_numpy(rng.normal(size=(rows, vocab_size)).astype(np.float32))
    where = torch.from_numpy(rng.random((rows, vocab_size)) < 0.1)
    logits[where] = BROKEN[torch.from_numpy(rng.integers(0, 4, int(where.sum())))]
    return logits


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize(("vocab_size", "words"), [(7, 1), (64, 2), (70, 2), (200, 9), (33, 2)])
@pytest.mark.parametrize("apply", [apply_masks_on_host, apply_masks_by_numba, apply_masks_on_device])
def test_only_tokens_of_masks_keep_their_logits(apply, vocab_size, words, finite):
    for seed in range(5):
        rng = np.random.default_rng([seed, vocab_size])
        logits, masks = random_logits(rng, 6, vocab_size), random_masks(rng, 6, vocab_size, words)
        expected = slow_apply(logits, masks, finite=finite)
        apply(logits, masks, finite)
        torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 40), (5, 4500)])
def test_triton_masks_equal_torch(interpreter, rows, vocab_size):
    from baton.runtime.sampling import triton_ops

    for finite in (False, True):
        rng = np.random.default_rng(vocab_size)
        logits, masks = random_logits(rng, rows, vocab_size), random_masks(rng, rows, vocab_size)
        expected = logits.clone()
        apply_masks_on_device(expected, masks, finite)
        triton_ops.apply_masks(logits, masks, finite)
        torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)


def test_allowed_tokens_hold_words_and_masks_side_by_side():
    """The same questions to both forms, and to a set of pairs."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        vocab_size = int(rng.choice([30, 64, 130]))
        masks = random_masks(rng, 5, vocab_size)
        listed = [(5 + int(row), int(token)) for row, token in zip(*(rng.random((3, vocab_size)) < 0.2).nonzero())]
        words = AllowedTokens.pack(*np.array(listed, dtype=np.int32).reshape(-1, 2).T)
        joined = AllowedTokens.join([(2, AllowedTokens.of_masks(masks)), (4, words)])
        assert joined is not None
        pairs = {(9 + row - 5, token) for row, token in listed}
        for place, row in enumerate(masks.rows.tolist()):
            pairs |= {(2 + row, token) for token in range(32 * masks.masks.shape[1]) if is_allowed(masks, place, token)}
        rows, tokens = joined.unpack()
        assert sorted(zip(rows.tolist(), tokens.tolist())) == sorted(pairs) and (np.diff(rows) >= 0).all()
        assert joined.count() == len(pairs)
        asked = rng.integers(0, 13, 300), rng.integers(-40, 2**31 - 1, 300) % (vocab_size + 60) - 5
        expected = [(int(row), int(token)) in pairs for row, token in zip(*asked)]
        assert joined.holds(*asked).tolist() == expected
        assert set(joined.named_rows().tolist()) == {2 + row for row in masks.rows.tolist()} | {row for row, _ in pairs}
        for row in range(13):
            assert joined.tokens_of(row).tolist() == sorted(token for other, token in pairs if other == row)
        moved = joined.renumber(lambda rows: (rows * 2).astype(np.int32))
        assert set(zip(*(part.tolist() for part in moved.unpack()))) == {(2 * row, token) for row, token in pairs}


def test_sequences_with_the_same_mask_share_it():
    one, other = np.array([5], dtype=np.uint32), np.array([5], dtype=np.uint32)
    masks = TokenMasks.stack(np.arange(4), [one, other, one, one])
    assert masks.mask_of.tolist() == [0, 1, 0, 0] and len(masks.masks) == 2 and masks.count().tolist() == [2] * 4
