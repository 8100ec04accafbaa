"""Every form of a matrix product gives the numbers of F.linear, at every number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton.attention import processor
from baton.runtime.layers import products
from baton.runtime.layers.products import (
    FORMS,
    NUMBA,
    ONEDNN,
    PACKED,
    ROW_COUNTS,
    TORCH,
    TRANSPOSED,
    WIDENED,
    Product,
    ProductChoice,
    Source,
)
from tests.doubles.block_kernel import kernel
from tests.doubles.lowered_processor import lower_to_avx2

MIXED = ProductChoice((TORCH, TRANSPOSED, TORCH, TRANSPOSED))
PACKED_MIX = ProductChoice((NUMBA, ONEDNN, NUMBA, ONEDNN))
CHOICES = [*(ProductChoice.of(form) for form in FORMS if form != WIDENED), MIXED, PACKED_MIX]
"""WIDENED is for narrow numbers alone."""


def prepare(choice: ProductChoice, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return choice.prepare(Source(weight, bias, kernel(weight.dtype) if NUMBA in choice.forms else None))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 8, 16, 17, 32, 48, 49])
def test_every_form_equals_f_linear(choice: ProductChoice, rows: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 48), torch.randn(128, 48)
    bias = torch.randn(128) if with_bias else None
    found = prepare(choice, weight, bias)(x)
    assert found.is_contiguous()
    torch.testing.assert_close(found, F.linear(x, weight, bias), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("rows", [1, 16])
def test_half_precision_keeps_its_dtype(choice: ProductChoice, rows: int) -> None:
    if not choice.keeps_weight and not processor.packs(torch.bfloat16):
        pytest.skip("oneDNN packs no bfloat16 on this processor")
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 8).bfloat16(), torch.randn(64, 8).bfloat16()
    found = prepare(choice, weight, None)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), x.float() @ weight.float().t(), atol=0.05, rtol=0.02)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_only_forms_reading_the_weight_keep_it(choice: ProductChoice) -> None:
    weight = torch.ones(64, 8)
    product = prepare(choice, weight, None)
    weight.zero_()
    assert bool(product(torch.ones(1, 8)).any()) is not choice.keeps_weight


def test_product_form_depends_on_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    for name in (TORCH, TRANSPOSED):
        monkeypatch.setitem(FORMS, name, lambda source, name=name: lambda x: seen.append(name))
    product = prepare(MIXED, torch.ones(4, 8), None)
    for rows in (1, 7, 8, 16, 17, 48, 49, 5000):
        product(torch.ones(rows, 8))
    assert seen == [TORCH, TORCH, TRANSPOSED, TRANSPOSED, TORCH, TORCH, TRANSPOSED, TRANSPOSED]


def test_a_product_choice_describes_itself() -> None:
    assert str(ProductChoice.of(ONEDNN)) == "onednn" and len(MIXED.forms) == len(ROW_COUNTS)
    assert str(MIXED) == "torch/transposed/torch/transposed"


def test_packed_forms_share_one_copy_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[torch.Tensor] = []
    for name in PACKED:
        monkeypatch.setitem(FORMS, name, lambda source: packed.append(source.blocks))
    prepare(PACKED_MIX, torch.ones(64, 8), None)
    assert len(packed) == 2 and packed[0] is packed[1]


def test_numba_form_without_kernels_raises() -> None:
    with pytest.raises(ValueError, match="Numba's kernels are not in use"):
        ProductChoice.of(NUMBA).prepare(Source(torch.ones(64, 8), None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 48, 130])
def test_widened_weights_are_rounded_once(
    dtype: torch.dtype, with_bias: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 96).to(dtype), torch.randn(70, 96).to(dtype)
    bias = torch.randn(70).to(dtype) if with_bias else None
    monkeypatch.setattr(products, "WIDENED_BYTES", 4 * 96 * 32)  # two parts of 32 outputs, and one of 6
    found = prepare(ProductChoice.of(WIDENED), weight, bias)(x)
    assert found.dtype == dtype and found.is_contiguous()
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Half a unit in the last place is what rounding costs; sums in float32 before it hardly anything.
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, atol=2e-5, rtol=0.51 * ulp if rows > 1 else 1.1 * ulp)


def test_float32_is_not_widened() -> None:
    with pytest.raises(ValueError, match="float32 is not widened"):
        ProductChoice.of(WIDENED).prepare(Source(torch.ones(64, 8), None))


@pytest.mark.parametrize("form", PACKED)
def test_a_processor_that_packs_no_bfloat16_raises_an_error(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN itself would look at the real processor."""
    lower_to_avx2(monkeypatch)
    source = Source(torch.ones(64, 8), None, kernel(torch.float32))
    assert ProductChoice.of(form).prepare(source)(torch.ones(1, 8)).shape == (1, 64)
    with pytest.raises(processor.CannotPackError, match="oneDNN packs no bfloat16 on this processor"):
        ProductChoice.of(form).prepare(Source(torch.ones(64, 8).bfloat16(), None, source.kernel))
