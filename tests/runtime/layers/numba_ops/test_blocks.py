"""Products of weights in oneDNN's blocks against the product in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.block_kernel import kernel
from tests.doubles.lowered_processor import lower_to_avx2, packs_bfloat16

pytest.importorskip("numba")

from baton.attention import processor
from baton.attention.numba_paged.team import Team
from baton.runtime.layers.numba_ops import blocks
from baton.runtime.layers.numba_ops.blocks import BlockProducts, UnknownBlocksError
from baton.runtime.layers.products import Product, Source, numba_product, reorder

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if processor.packs(dtype)]


def scene(rows: int, into: int, out: int, dtype: torch.dtype, *, has_bias: bool = False, seed: int = 0):
    """x, the product, what it should give, and how far off that may be."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (
        torch.randn(*size, generator=generator).to(dtype) for size in ((rows, into), (out, into), (out,))
    )
    product = numba_product(Source(weight, bias if has_bias else None, kernel(dtype)))
    expected = x.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    return x, product, expected


def check(product: Product, x: torch.Tensor, expected: torch.Tensor) -> None:
    found = product(x)
    assert found.is_contiguous() and found.dtype == x.dtype and found.shape == expected.shape
    allowed = 4e-6 if x.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found.double(), expected, atol=allowed * x.shape[1] ** 0.5, rtol=allowed)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    half=st.integers(1, 700),
    blocks_of=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_sizes_match_reference(
    rows: int, half: int, blocks_of: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    try:
        x, product, expected = scene(rows, 2 * half, 64 * blocks_of, dtype, has_bias=has_bias, seed=seed)
    except UnknownBlocksError:  # without AVX-512, oneDNN cuts 192 outputs into four
        assert blocks_of == 3
        return
    check(product, x, expected)


def test_block_products_with_odd_number_of_inputs() -> None:
    x, product, expected = scene(3, 77, 64, torch.float32)
    check(product, x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_block_products_with_several_threads(threads: int, dtype: torch.dtype) -> None:
    x, product, expected = scene(9, 64, 64 * 7, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(product, x, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_batch_invariant(dtype: torch.dtype) -> None:
    """Or a request's tokens would depend on the batch it is in."""
    x, product, _ = scene(31, 1408, 128, dtype, has_bias=True)
    alone = torch.cat([product(row.unsqueeze(0)) for row in x])
    for rows in range(2, len(x) + 1):
        assert torch.equal(product(x[:rows]), alone[:rows])


def test_rows_may_be_strided() -> None:
    x, product, expected = scene(6, 64, 64, torch.float32)
    apart = torch.zeros(6, 100)[:, :64]
    apart.copy_(x)
    check(product, apart, expected)


def test_long_sums_are_as_exact_as_torch() -> None:
    x, product, expected = scene(5, 8192, 64, torch.float32)
    generator = torch.Generator().manual_seed(0)
    torch.randn(5, 8192, generator=generator)
    weight = torch.randn(64, 8192, generator=generator)
    worst = float((torch.nn.functional.linear(x, weight).double() - expected).abs().max())
    assert float((product(x).double() - expected).abs().max()) < 4 * worst


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    x, product, _ = scene(13, 64, 128, dtype)
    x[7, 5] = float("nan")
    found = product(x)
    assert found[7].isnan().all() and not found[[row for row in range(13) if row != 7]].isnan().any()


def test_pages_that_do_not_fill_blocks_are_refused() -> None:
    with pytest.raises(UnknownBlocksError, match="80 × 64 numbers do not fill blocks of"):
        scene(1, 64, 80, torch.float32)
    with pytest.raises(UnknownBlocksError, match="float16"):
        BlockProducts(Team(), torch.float16)


@packs_bfloat16
def test_odd_number_of_bfloat16_inputs_is_refused() -> None:
    with pytest.raises(UnknownBlocksError, match="64 × 33 numbers"):
        scene(1, 33, 64, torch.bfloat16)


def test_no_bfloat16_product_kernel_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_to_avx2(monkeypatch)
    blocks.width_of_blocks.cache_clear()
    try:
        with pytest.raises(processor.CannotPackError, match="packs no bfloat16"):
            BlockProducts(Team(), torch.bfloat16)
    finally:
        blocks.width_of_blocks.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_unknown_block_layout_is_detected(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another processor, or another oneDNN, may have such a layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(blocks, "reorder", lambda weight: packed(weight.flip(0).contiguous(), 32))
    blocks.width_of_blocks.cache_clear()
    try:
        with pytest.raises(UnknownBlocksError, match="another way"):
            BlockProducts(Team(), dtype)
    finally:
        blocks.width_of_blocks.cache_clear()


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 14), min_size=1, max_size=9),
    half=st.integers(1, 200),
    blocks_of=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_of_groups_are_those_of_each_alone(
    counts: list[int], half: int, blocks_of: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    """Bit for bit: the same kernel, called once for all."""
    generator = torch.Generator().manual_seed(seed)
    size = 64 * blocks_of, 2 * half
    weights = [torch.randn(*size, generator=generator).to(dtype) for _ in counts]
    biases = [torch.randn(size[0], generator=generator).to(dtype) if has_bias else None for _ in counts]
    x = torch.randn(sum(counts), size[1], generator=generator).to(dtype)
    group = kernel(dtype).prepare_group([reorder(weight) for weight in weights], size, biases)
    used = np.flatnonzero(counts)
    found = group(x, used, np.array(counts)[used])
    start = 0
    for weight, bias, count in zip(weights, biases, counts, strict=True):
        own = slice(start, start + count)
        if count:
            assert torch.equal(found[own], numba_product(Source(weight, bias, kernel(dtype)))(x[own]))
        start += count
    assert len(found) == start and found.is_contiguous()
