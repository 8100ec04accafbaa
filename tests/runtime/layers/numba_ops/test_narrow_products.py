"""Products with weights of 16 and 8 bits that are widened as they are read, against the product in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.doubles.lowered_processor import lower_to_avx2

pytest.importorskip("numba")

from baton.attention.numba_paged.recording import TeamRecorder
from baton.attention.numba_paged.team import Team
from baton.runtime.layers.numba_ops import narrow_products
from baton.runtime.layers.numba_ops.narrow_products import MANY, WIDTH
from baton.runtime.layers.numba_ops.packed_blocks import NoKernelError
from baton.runtime.layers.numba_ops.packed_products import PackedProducts
from baton.runtime.layers.quantize import narrowed, quantize
from baton.runtime.layers.quantized_weights import FLOAT8, INT8, Float8Weight, PackedWeight

TEAM = Team()
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _without_units(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_to_avx2(monkeypatch)


def product_of(
    weights: list[torch.Tensor | PackedWeight], bias: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
):
    kernel = PackedProducts(TEAM)
    return kernel.prepare(kernel.pack(weights), bias, dtype)


def numbers(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("stored", HALVES)
@pytest.mark.parametrize(("out", "into", "has_bias"), [(96, 128, True), (70, 1040, False), (1, 16, True)])
def test_products_round_nothing_but_sums(stored: torch.dtype, out: int, into: int, has_bias: bool) -> None:
    weight, x = numbers(out, into).to(stored), numbers(31, into, seed=1)
    bias = numbers(out, seed=2) if has_bias else None
    found = product_of([weight], bias)(x)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert found.is_contiguous() and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, atol=4e-6 * into**0.5, rtol=4e-6)


@pytest.mark.parametrize("dtype", HALVES)
def test_narrow_inputs_are_widened_and_outputs_rounded_once(dtype: torch.dtype) -> None:
    weight, bias = numbers(70, 256).to(dtype), numbers(70, seed=3).to(dtype)
    x = numbers(9, 300, seed=1).to(dtype)[:, 20:276]
    wide = product_of([weight], bias.float())(x.float())
    found = product_of([weight], bias, dtype)(x)
    assert found.dtype == dtype and torch.equal(found, wide.to(dtype))


@pytest.mark.parametrize("stored", HALVES)
def test_subnormal_and_infinite_numbers_are_not_lost(stored: torch.dtype) -> None:
    tiny = torch.finfo(stored).smallest_normal / 4
    weight = torch.zeros(32, 16, dtype=stored)
    weight[0, 0], weight[1, 1], weight[2, 2] = tiny, torch.finfo(stored).max, float("inf")
    x = torch.ones(1, 16)
    x[0, 0] = 2.0**100
    found = product_of([weight])(x)[0]
    assert found[0] == float(weight[0, 0]) * 2.0**100 and found[0] > 0
    assert found[1] == torch.finfo(stored).max and found[2].isinf()


@pytest.mark.parametrize("stored", HALVES)
def test_results_of_a_row_do_not_depend_on_its_batch(stored: torch.dtype) -> None:
    product, x = product_of([numbers(96, 1408).to(stored)]), numbers(31, 1408, seed=1)
    whole = product(x)
    for rows in (1, 2, 3, 5, 6, 7, 11, 12, 13, 24):
        assert torch.equal(product(x[:rows]), whole[:rows])
        assert torch.equal(product(x[-rows:]), whole[-rows:])


def float8(out: int, into: int, group: int, seed: int = 0) -> Float8Weight:
    codes = (60 * numbers(out, into, seed=seed)).clamp(-448, 448).to(FLOAT8)
    return Float8Weight(codes, 0.01 + numbers(out, -(-into // group) if group else 1, seed=seed + 1).abs(), group)


@pytest.mark.parametrize("group", [0, 128, 100, 1000])
@pytest.mark.parametrize(("out", "into", "has_bias"), [(96, 256, True), (70, 1040, False), (1, 16, True)])
def test_8_bit_floats_round_nothing_but_sums(out: int, into: int, has_bias: bool, group: int) -> None:
    """Also where the last group has fewer inputs, or one group has all."""
    weight, x = float8(out, into, group), numbers(31, into, seed=5)
    bias = numbers(out, seed=2) if has_bias else None
    found = product_of([weight], bias)(x)
    expected = x.double() @ weight.dequantized().double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(found.double(), expected, atol=2e-4 * into**0.5, rtol=4e-6)


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_results_of_a_row_do_not_depend_on_its_batch(
    dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on whether the weight is widened first, in three parts here, the last of them smaller."""
    monkeypatch.setattr(narrow_products, "WIDENED_BYTES", 2 * 4 * 1408 * WIDTH // torch.get_num_threads())
    bias = numbers(150, seed=9).to(dtype)
    product, x = product_of([float8(150, 1408, group)], bias, dtype), numbers(MANY + 13, 1408, seed=1).to(dtype)
    whole = product(x)
    for rows in (1, 2, 3, 5, 6, 7, 11, 12, 13, MANY - 1, MANY):
        assert torch.equal(product(x[:rows]), whole[:rows])
        assert torch.equal(product(x[-rows:]), whole[-rows:])


def test_weights_are_widened_first_from_many_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    product, widened = product_of([float8(96, 256, 0)]), []
    widen = narrow_products.NarrowPart._widen_blocks
    monkeypatch.setattr(
        narrow_products.NarrowPart, "_widen_blocks", lambda *args: widened.append(len(args[2])) or widen(*args)
    )
    product(numbers(MANY - 1, 256))
    assert not widened
    product(numbers(MANY, 256))
    assert widened == [3]
    product_of([float8(32, 4096, 0)])(numbers(MANY, 4096))
    assert widened == [3], "a block would not stay in a core's cache"


def test_weights_are_widened_in_recorded_steps() -> None:
    product, x = product_of([float8(96, 256, 128)]), numbers(MANY + 3, 256)
    expected = product(x)
    output, replay = TeamRecorder(TEAM).record(lambda: product(x))
    for _ in range(2):
        output.zero_()
        replay()
        assert torch.equal(output, expected)


def test_every_number_of_8_bits_is_widened_exactly() -> None:
    """Subnormal ones and both zeros too."""
    codes = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
    finite = codes[~codes.float().isnan()]
    weight = torch.zeros(len(finite), 16, dtype=FLOAT8)
    weight[:, 0] = finite
    x = torch.zeros(1, 16)
    x[0, 0] = 1.0
    found = product_of([Float8Weight(weight, torch.ones(len(finite), 1), 0)])(x)[0]
    assert torch.equal(found, finite.float())


def test_8_bit_floats_of_several_groups_stand_side_by_side() -> None:
    parts = [float8(33, 256, 0), float8(20, 256, 0, seed=2), float8(40, 256, 128, seed=4)]
    few, x = quantize(numbers(40, 256, seed=6), INT8), numbers(7, 256, seed=7)
    kernel = PackedProducts(TEAM)
    packed = kernel.pack([*parts, few])
    assert [blocks.size for blocks in packed] == [(53, 256), (40, 256), (40, 256)]
    found = kernel.prepare(packed, None, torch.float32)(x)
    expected = x.double() @ torch.cat([each.dequantized() for each in (*parts, few)]).double().t()
    torch.testing.assert_close(found[:, :93].double(), expected[:, :93], atol=5e-3, rtol=4e-6)


@pytest.mark.parametrize("form", [FLOAT8, torch.bfloat16, torch.float16, INT8])
def test_forms_are_tried_out(form: Any) -> None:
    assert isinstance(PackedProducts.probed(TEAM, [form]), PackedProducts)


def test_floats_and_few_bits_stand_side_by_side() -> None:
    """A fused layer of a file that quantises some projections only; the first one's outputs do not fill its blocks."""
    floats = [numbers(70, 64).bfloat16(), numbers(5, 64, seed=1).bfloat16(), numbers(33, 64, seed=2).half()]
    few = quantize(numbers(40, 64, seed=3), INT8)
    kernel, bias, x = PackedProducts(TEAM), numbers(148, seed=4), numbers(7, 64, seed=5)
    packed = kernel.pack([*floats[:2], few, floats[2]])
    assert [blocks.size for blocks in packed] == [(75, 64), (40, 64), (33, 64)]
    found = kernel.prepare(packed, bias, torch.float32)(x)
    parts = [*floats[:2], few.dequantized(), floats[2]]
    expected = x.double() @ torch.cat([part.double() for part in parts]).t() + bias.double()
    error = (found.double() - expected).abs()
    assert error[:, :75].max() < 1e-4 and error[:, 115:].max() < 1e-4 and error.max() < 0.3


def test_weights_without_a_kernel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoKernelError, match="17 inputs"):
        PackedProducts(TEAM).pack([numbers(32, 17).bfloat16()])
    with pytest.raises(NoKernelError, match="17 inputs"):
        PackedProducts(TEAM).pack([narrowed(numbers(32, 17), FLOAT8)])
    with pytest.raises(NoKernelError, match="float32 needs no packing"):
        PackedProducts(TEAM).pack([numbers(32, 32)])
    monkeypatch.setattr("baton.attention.processor.multiplies", lambda dtype: True)
    with pytest.raises(NoKernelError, match="bfloat16 needs no packing"):
        PackedProducts(TEAM).pack([numbers(32, 32).bfloat16()])
