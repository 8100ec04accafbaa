from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.runtime.ranking import top_tokens


@pytest.mark.parametrize("k", [1, 5, 50, 200])
def test_descending_and_ties_by_token_id(k):
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


def test_k_beyond_the_vocabulary_ranks_all():
    assert top_tokens(torch.tensor([[1.0, 3.0, 2.0]]), 50)[1].tolist() == [[1, 2, 0]]
