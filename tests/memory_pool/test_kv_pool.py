from __future__ import annotations

import pytest
import torch

from baton.memory_pool.kv_pool import MHAKVPool, kv_bytes_per_token

CPU = torch.device("cpu")


def make_pool(num_tokens: int = 32, page_size: int = 16) -> MHAKVPool:
    return MHAKVPool(
        num_tokens=num_tokens,
        page_size=page_size,
        num_layers=2,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.float32,
        device=CPU,
    )


def test_the_padding_page_comes_on_top():
    pool = make_pool()
    assert pool.num_slots == 48
    assert [tensor.shape for tensor in (*pool.k, *pool.v)] == [(48, 2, 4)] * 4


def test_fresh_slots_are_zero_so_that_masked_reads_stay_finite():
    pool = make_pool()
    assert all(bool((tensor == 0).all()) for tensor in (*pool.k, *pool.v))


def test_bytes_per_token_and_the_log_line():
    assert kv_bytes_per_token(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.bfloat16) == 64
    pool = make_pool()
    assert pool.bytes_per_token == 128
    assert sum(tensor.nbytes for tensor in (*pool.k, *pool.v)) == 128 * pool.num_slots
    assert pool.describe() == "KV pool: 32 tokens × 128 bytes = 0.00 GiB"


@pytest.mark.parametrize("num_tokens", [0, 8, 40])
def test_a_size_that_is_no_multiple_of_the_page_is_refused(num_tokens):
    with pytest.raises(ValueError, match="multiple of the page size"):
        make_pool(num_tokens=num_tokens)


def test_a_pool_the_device_cannot_hold_names_the_flag():
    with pytest.raises(MemoryError, match="--max-total-tokens"):
        make_pool(num_tokens=2**45, page_size=1)
