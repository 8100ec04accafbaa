"""Weights in few bits made from float ones: how far off they are, and what must come back as it was."""

from __future__ import annotations

import pytest
import torch

from baton.runtime.layers.quantize import narrowed, quantize
from baton.runtime.layers.quantized_weights import (
    FLOAT8,
    INT4,
    INT8,
    Float8Weight,
    QuantForm,
    QuantizedWeight,
    concatenated,
)

FORMS = [
    (QuantForm(8), 127),
    (INT8, 127),
    (QuantForm(8, 32, has_mins=True), 255),
    (QuantForm(4, 32), 7),
    (INT4, 15),
    (QuantForm(4, 128, has_mins=True), 15),
]
"""Form and the number of steps in a group's range, on one side of 0 or on both."""


def some_weight(out: int = 40, into: int = 320) -> torch.Tensor:
    """Rows of all sizes that float32 has, zeros among them."""
    weight = torch.randn(out, into, generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-30, 30, out)[:, None]
    weight[3], weight[4, :64] = 0, 0
    return weight


def spans(weight: torch.Tensor, form: QuantForm) -> torch.Tensor:
    """The range of each weight's group: [out, in]"""
    group = form.group or weight.shape[1]
    groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    size = high - low if form.has_mins else torch.maximum(high, -low)
    return size.repeat_interleave(group, 1)[:, : weight.shape[1]]


@pytest.mark.parametrize(("form", "steps"), FORMS, ids=lambda value: str(value))
def test_no_number_is_further_off_than_half_a_step(form: QuantForm, steps: int) -> None:
    weight = some_weight()
    found = quantize(weight, form)
    assert found.shape == tuple(weight.shape)
    # Groups of 4 bits may be cut off at four fifths of their range, where that leaves smaller errors on the whole.
    cut = 0.2 if form.bits == 4 and form.has_mins else 0.0
    allowed = spans(weight, form) * (0.5 / steps + cut + 2e-3)
    assert ((found.dequantized() - weight).abs() <= allowed).all()


@pytest.mark.parametrize(("form", "_steps"), FORMS, ids=lambda value: str(value))
def test_weights_that_have_the_form_come_back_unchanged(form: QuantForm, _steps: int) -> None:
    numbers = quantize(some_weight(), form).dequantized()
    again = quantize(numbers, form).dequantized()
    torch.testing.assert_close(again, numbers, rtol=1e-6, atol=0)


def test_8_bit_floats_are_off_by_their_rounding_alone() -> None:
    """Half a unit of three bits of mantissa, or of the smallest number beside the largest of the row."""
    weight = some_weight()
    found = narrowed(weight, FLOAT8)
    assert isinstance(found, Float8Weight) and found.shape == tuple(weight.shape)
    numbers, largest = found.dequantized(), weight.abs().amax(1, keepdim=True)
    assert numbers.isfinite().all() and not numbers[3].any()
    assert ((numbers - weight).abs() <= torch.maximum(weight.abs() / 16, largest / 448 * 2**-10) * (1 + 1e-5)).all()
    again = narrowed(numbers, FLOAT8)
    assert isinstance(again, Float8Weight)
    torch.testing.assert_close(again.dequantized(), numbers, rtol=1e-6, atol=0)


def test_16_bit_floats_are_rounded_once() -> None:
    weight = some_weight()
    assert torch.equal(torch.as_tensor(narrowed(weight, torch.bfloat16)), weight.bfloat16())


def test_search_leaves_smaller_squared_errors_than_the_whole_range() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    plain = ((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low
    found = quantize(weight, INT4).dequantized()
    assert (found - weight).square().sum() < 0.99 * (plain.flatten(1) - weight).square().sum()


def test_outputs_share_memory_and_join_again() -> None:
    weight = quantize(some_weight(), INT4)
    parts = [weight.outputs(slice(0, 24)), weight.outputs(slice(24, 40))]
    assert parts[1].codes.data_ptr() == weight.codes[24:].data_ptr()
    joined = concatenated(parts)
    assert torch.equal(joined.dequantized(), weight.dequantized())
    order = torch.arange(39, -1, -1)
    assert torch.equal(weight.outputs(order).dequantized(), weight.dequantized()[order])


def test_mxfp4_codes_stand_for_the_numbers_of_the_format() -> None:
    form = QuantForm(4, 32, codebook="mxfp4")
    weight = QuantizedWeight.empty(1, 32, form)
    codes = torch.arange(32, dtype=torch.uint8)[None] % 16
    weight.codes.copy_(codes[:, ::2] | (codes[:, 1::2] << 4))
    assert weight.scales is not None
    weight.scales.fill_(0.25)
    expected = [0, 0.125, 0.25, 0.375, 0.5, 0.75, 1, 1.5, 0, -0.125, -0.25, -0.375, -0.5, -0.75, -1, -1.5]
    assert weight.dequantized()[0, :16].tolist() == expected
