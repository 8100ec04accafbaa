from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from baton.runtime.sampling.ranking import BEST_CHUNK, MIN_CHUNKED, best_tokens, top_tokens


@pytest.mark.parametrize("k", [1, 5, 50, 200])
def test_top_tokens_descend_with_ties_by_token_id(k):
    rng = np.random.default_rng(k)
    # bf16 and few levels: nearly every value is tied
    logits = torch.from_numpy(rng.integers(-20, 20, (7, 200)).astype(np.float32) / 4).bfloat16().float()
    logits[:, 10] = -float("inf")
    logits[3] = 0.25
    logits[4, ::2] = float("inf")
    values, ids = top_tokens(logits, k)
    order = np.lexsort((np.broadcast_to(np.arange(200), (7, 200)), -logits.numpy()), axis=-1)[:, :k]
    assert np.array_equal(ids.numpy(), order)
    assert torch.equal(values, logits.gather(1, ids))


def test_tiny_and_negative_values_keep_their_order():
    logits = torch.tensor([[-1e-40, 1e-40, 0.0, -1.5, -3e38, 3e38, -1.25]])
    assert top_tokens(logits, 7)[1].tolist() == [[5, 1, 2, 0, 6, 3, 4]]


@pytest.mark.parametrize("vocab_size", [MIN_CHUNKED - 1, MIN_CHUNKED, 16_500, 50_257])
@pytest.mark.parametrize("k", [1, 50, 255, 256, 700])
def test_wide_vocabulary_ranking_equals_stable_sort(vocab_size, k):
    """By chunks or not: ties everywhere, zeros of both signs, rows with nothing or little but -inf."""
    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(5, vocab_size, generator=generator).bfloat16().float()
    logits[1] = -float("inf")
    logits[2, vocab_size // 2 :], logits[2, ::3] = 0.0, -0.0
    logits[3, :-5] = -float("inf")
    logits[4, -3:] = float("inf")
    values, ids = top_tokens(logits, k)
    expected = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, expected.indices[:, :k]) and torch.equal(values, expected.values[:, :k])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_rows_still_give_valid_token_ids(sign):
    logits = torch.full((2, 16_401), math.copysign(math.nan, sign))
    ids = top_tokens(logits, 40)[1]
    assert ids.min() >= 0 and ids.max() < 16_401


def by_numba(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pytest.importorskip("numba")
    from baton.runtime.sampling.numba_ranking import BestTokens

    return BestTokens()(logits)


@pytest.mark.parametrize("find", [best_tokens, by_numba])
@pytest.mark.parametrize("vocab_size", [200, MIN_CHUNKED, MIN_CHUNKED + 1, MIN_CHUNKED + BEST_CHUNK - 1, 50_257])
def test_best_token_is_first_of_the_highest(find, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(13, vocab_size, generator=generator).bfloat16().float()
    logits[1] = -float("inf")
    logits[2, ::2], logits[2, 1::2] = -0.0, 0.0
    logits[3, -1] = 99.0
    logits[4, [3, vocab_size // 2, -1]] = float("inf")
    logits[5, [vocab_size // 3, -2]] = math.nan
    logits[6, 0] = 99.0
    logits[7, -BEST_CHUNK:] = 99.0
    logits[8, [9, -3]] = math.copysign(math.nan, -1.0)
    logits[8, 11] = float("inf")
    logits[9] = -3e38
    logits[9, vocab_size // 2 :] = -2.9e38
    logits[10] = -1e-30
    logits[10, -1] = 1e-40  # smaller than the normal numbers
    logits[11] = math.nan
    best, ids = find(logits)
    expected = logits.max(dim=-1)
    assert torch.equal(ids, expected.indices) and torch.equal(best.nan_to_num(7), expected.values.nan_to_num(7))
    assert ids.dtype == torch.int64 and ids[2] == 0
    some, some_ids = find(logits[3:4])
    assert some_ids.tolist() == [vocab_size - 1] and some.tolist() == [99.0]


def test_k_beyond_the_vocabulary_ranks_all():
    assert top_tokens(torch.tensor([[1.0, 3.0, 2.0]]), 50)[1].tolist() == [[1, 2, 0]]
