"""Rows of the KV pool: what is stored is read again as exactly as the type allows, whatever the numbers are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.memory_pool.kv_pool import KVShape, MHAKVPool, WindowedKVPool, kv_bytes_per_token, make_kv_pool
from baton.memory_pool.kv_pool import uniform_shapes as alike
from baton.memory_pool.kv_rows import (
    LARGEST,
    is_quantized,
    quantize,
    read_rows,
    row_bytes,
    row_items,
    scales_of,
    select_rows,
    store_rows,
)

CPU = torch.device("cpu")
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Relative error of a normal 8-bit float."""


def round_trip(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return read_rows(quantize(rows, dtype).view(dtype), rows.shape[-1], torch.float32)


def allowed_error(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of each number: half of the step between the numbers of a row, and float32's own rounding."""
    largest = rows.abs().amax(-1, keepdim=True).expand_as(rows)
    if dtype == INT8:
        return largest * (0.5 / 127 * 1.001)
    least_step = {E4M3: 2.0**-9, E5M2: 2.0**-16}[dtype]
    return torch.maximum(rows.abs() * HALF_STEP[dtype], largest / LARGEST[dtype] * least_step / 2) * 1.001


@pytest.mark.parametrize("dtype", list(LARGEST), ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 70), exponent=st.integers(-24, 15), seed=st.integers(0, 1 << 20))
def test_numbers_are_rounded_to_the_nearest(
    dtype: torch.dtype, source: torch.dtype, size: int, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(3, 2, size, generator=generator) * 2.0**exponent).clamp(-6e4, 6e4).to(source)
    wide = rows.float()
    found = round_trip(rows, dtype)
    assert ((found - wide).abs() <= allowed_error(wide, dtype)).all()
    largest = wide.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(found.gather(-1, largest), wide.gather(-1, largest), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", list(LARGEST), ids=str)
def test_rows_do_not_depend_on_their_neighbours(dtype: torch.dtype) -> None:
    rows = torch.randn(7, 3, 12, generator=torch.Generator().manual_seed(1))
    whole = quantize(rows, dtype)
    rows[4] = 1e9
    alone = torch.stack([quantize(row, dtype) for row in rows])
    assert torch.equal(alone[[0, 1, 2, 3, 5, 6]], whole[[0, 1, 2, 3, 5, 6]])


@pytest.mark.parametrize("dtype", list(LARGEST), ids=str)
def test_extreme_rows(dtype: torch.dtype) -> None:
    top = torch.finfo(torch.float32).max
    rows = torch.zeros(5, 6)
    rows[1], rows[2, 3], rows[3] = top / 2, -top / 2, torch.finfo(torch.float32).tiny / 4
    rows[4, 0], rows[4, 1] = 1e30, 1e-30
    found, scales = round_trip(rows, dtype), scales_of(quantize(rows, dtype), 6)
    assert found.isfinite().all() and scales.isfinite().all()
    assert (scales >= torch.finfo(torch.float32).tiny).all(), "no scale is 0 or subnormal"
    assert not found[0].any() and (found[3].abs() < 2.0**-100).all()
    torch.testing.assert_close(found[[1, 2, 4]], rows[[1, 2, 4]], rtol=1e-6, atol=1e-29)


@pytest.mark.parametrize("dtype", list(LARGEST), ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_row_that_is_not_finite_is_nan(dtype: torch.dtype, bad: float) -> None:
    rows = torch.ones(3, 2, 5)
    rows[1, 1, 4] = bad
    found = round_trip(rows, dtype)
    assert found[1, 1].isnan().all()
    found[1, 1] = 1.0
    torch.testing.assert_close(found, torch.ones_like(found))


def test_untouched_rows_are_zeros() -> None:
    for dtype in LARGEST:
        assert not read_rows(torch.zeros(4, row_items(9, dtype), dtype=dtype), 9, torch.bfloat16).any()


@pytest.mark.parametrize("dtype", [*FLOATS, *LARGEST], ids=str)
@pytest.mark.parametrize("size", [8, 6])
def test_store_and_select(dtype: torch.dtype, size: int) -> None:
    pool = torch.zeros(9, 2, row_items(size, dtype), dtype=dtype)
    rows = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(2))
    slots = torch.tensor([7, 0, 3])
    store_rows(pool, slots, rows)
    expected = round_trip(rows, dtype) if is_quantized(dtype) else rows.to(dtype).float()
    assert torch.equal(read_rows(select_rows(pool, slots.int()), size, torch.float32), expected)
    others = select_rows(pool, torch.tensor([1, 2, 4, 5, 6, 8]))
    assert not others.view(torch.uint8).any()


def test_bytes_of_a_token() -> None:
    assert [row_bytes(64, dtype) for dtype in (torch.float32, torch.bfloat16, INT8, E4M3, E5M2)] == [
        256,
        128,
        68,
        68,
        68,
    ]
    shapes = [KVShape(3, 64, 64), KVShape(1, 20, 6)]
    assert kv_bytes_per_token(shapes, INT8) == 3 * (68 + 68) + 24 + 12
    pool = make_kv_pool(num_tokens=8, page_size=4, shapes=shapes, dtype=INT8, model_dtype=torch.float32, device=CPU)
    assert pool.bytes_per_token == 3 * 136 + 36 and pool.model_dtype == torch.float32
    assert sum(tensor.nbytes for tensor in (*pool.layers.k, *pool.layers.v)) == 12 * pool.bytes_per_token
    assert [tensor.dtype for tensor in (pool.k[0], pool.v[1], pool.layers.k[0])] == [INT8, INT8, torch.uint8]


@pytest.mark.parametrize("dtype", list(LARGEST), ids=str)
def test_pool_copies_rows_and_finds_those_that_are_not_finite(dtype: torch.dtype) -> None:
    pool = MHAKVPool(num_tokens=32, page_size=1, shapes=alike(2, 2, 6), dtype=dtype, device=CPU)
    rows = torch.randn(33, 2, 6, generator=torch.Generator().manual_seed(3))
    for tensor in (*pool.k, *pool.v):
        store_rows(tensor, torch.arange(33), rows)
    slots = torch.tensor([9, 4, 30, 2])
    assert pool.first_not_finite(slots) is None
    rows[0, 1, 5] = float("inf")
    store_rows(pool.v[1], torch.tensor([30]), rows[:1])
    assert pool.first_not_finite(slots, piece=3) == 2
    pool.copy(torch.tensor([30, 4]), torch.tensor([4, 5]))
    assert pool.first_not_finite(slots, piece=3) == 1
    before, after = (select_rows(pool.k[0], torch.tensor([slot])).view(torch.uint8) for slot in (30, 4))
    assert torch.equal(before, after)


def test_layers_with_windows_have_the_same_type() -> None:
    parts = [make_kv_pool(num_tokens=4, page_size=1, shapes=alike(1, 1, 8), dtype=INT8, device=CPU) for _ in range(2)]
    pool = WindowedKVPool(parts[0], parts[1], frozenset({1}))
    assert pool.dtype == INT8 and pool.bytes_per_token == 24 and pool.k[1] is parts[1].k[0]


def test_latents_are_not_quantized() -> None:
    shapes = [KVShape(1, 12, 8, values_in_keys=True)]
    with pytest.raises(ValueError, match="latents of a model"):
        make_kv_pool(num_tokens=4, page_size=1, shapes=shapes, dtype=INT8, model_dtype=torch.float32, device=CPU)
