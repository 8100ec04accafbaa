"""Logits of a head in bfloat16 against the product in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from baton.runtime.layers.numba_ops import logits
from baton.runtime.layers.numba_ops.logits import AT_ONCE, ExactLogits, WrongNumbers


def scene(rows: int, size: int, outs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, the weight, and their product."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator)
    weight = torch.randn(outs, size, generator=generator).to(torch.bfloat16)
    return x, weight, (x.double() @ weight.double().t()).float()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 11), half=st.sampled_from([1, 3, 16, 17, 40]), outs=st.integers(1, 150), seed=st.integers(0, 99)
)
def test_random_sizes_match_reference(rows: int, half: int, outs: int, seed: int) -> None:
    x, weight, expected = scene(rows, 2 * half, outs, seed)
    found = ExactLogits(2 * half)(x, weight)
    assert found.is_contiguous() and found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_exact_logits_with_several_threads(threads: int) -> None:
    x, weight, expected = scene(9, 64, 7 * AT_ONCE + 3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.testing.assert_close(ExactLogits(64)(x, weight), expected, atol=1e-4, rtol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_rows_are_batch_invariant() -> None:
    """Or a request's tokens would depend on the batch it is in."""
    x, weight, _ = scene(7, 96, 200)
    product = ExactLogits(96)
    assert torch.equal(product(x, weight), torch.cat([product(row.unsqueeze(0), weight) for row in x]))


def test_nan_stays_nan() -> None:
    x, weight, _ = scene(2, 32, 5)
    weight[3, 7] = float("nan")
    found = ExactLogits(32)(x, weight)
    assert found.isnan().nonzero().tolist() == [[0, 3], [1, 3]]


def test_neighbours_that_are_equal_in_bfloat16_are_distinguished() -> None:
    """20 and 20.05: one number after rounding."""
    x, weight = torch.tensor([[20.0, 0.05]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]).to(torch.bfloat16)
    first, second = ExactLogits(2)(x, weight)[0].tolist()
    assert second - first == pytest.approx(0.05, abs=1e-5)
    rounded = torch.nn.functional.linear(x.to(torch.bfloat16), weight)[0]
    assert rounded[0] == rounded[1]


def test_odd_sizes_and_wrong_logits_kernel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="not made of pairs"):
        ExactLogits(7)
    monkeypatch.setattr(logits.F, "linear", lambda x, weight: x.new_ones(len(x), len(weight)))
    with pytest.raises(WrongNumbers):
        ExactLogits(8)
