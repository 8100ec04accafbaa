from __future__ import annotations

import math

import pytest
import torch

from baton.runtime.layers.rotary import RotaryEmbedding, apply_rotary, head_order, inverse_frequencies
from baton.runtime.model_config import RopeConfig

CPU = torch.device("cpu")


def rotate_by_hand(x: torch.Tensor, position: int, frequencies: torch.Tensor) -> torch.Tensor:
    """One head [head_dim]: coordinates (i, i + half) turn by position * frequency_i."""
    half, out = len(frequencies), torch.empty_like(x)
    for i, frequency in enumerate(frequencies.tolist()):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def test_pairs_rotate_by_position_times_frequency():
    rope = RopeConfig(theta=100.0)
    frequencies = torch.tensor([1.0, 100.0 ** (-1 / 3), 100.0 ** (-2 / 3)])
    torch.testing.assert_close(inverse_frequencies(rope, 6), frequencies)
    positions = torch.tensor([0, 5, 17])
    x = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0))
    rotary = RotaryEmbedding(rope, 6, 32, dtype=torch.float32, device=CPU)
    found = apply_rotary(x, rotary.table[positions])
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            expected = rotate_by_hand(x[token, head], position, frequencies)
            torch.testing.assert_close(found[token, head], expected, atol=1e-5, rtol=1e-5)


def test_linear_scaling_slows_every_pair():
    plain = inverse_frequencies(RopeConfig(theta=1e4), 8)
    scaled = inverse_frequencies(RopeConfig(theta=1e4, rope_type="linear", factor=4.0), 8)
    torch.testing.assert_close(scaled, plain / 4)


def test_llama3_keeps_fast_pairs_and_slows_slow_ones():
    rope = RopeConfig(
        theta=5e5,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain, scaled = inverse_frequencies(RopeConfig(theta=5e5), 128), inverse_frequencies(rope, 128)
    turns = 8192 * plain / (2 * math.pi)
    assert torch.equal(scaled[turns >= 4], plain[turns >= 4])
    torch.testing.assert_close(scaled[turns <= 1], plain[turns <= 1] / 8)
    between = scaled[(turns > 1) & (turns < 4)] / plain[(turns > 1) & (turns < 4)]
    assert len(between) and bool(((between > 1 / 8) & (between < 1)).all()) and bool((between.diff() < 0).all())


def test_unknown_rope_type_is_refused():
    with pytest.raises(ValueError, match="axial"):
        inverse_frequencies(RopeConfig(theta=1e4, rope_type="axial"), 8)


@pytest.mark.parametrize("is_interleaved, order", [(False, [0, 1, 4, 2, 3, 5]), (True, [0, 2, 4, 1, 3, 5])])
def test_pairs_of_a_part_are_half_a_head_apart_in_head_order(is_interleaved, order):
    found = head_order(RopeConfig(theta=1e4, partial=4 / 6), 6, is_interleaved=is_interleaved)
    assert found is not None and found.tolist() == order


def test_head_order_is_the_checkpoints_where_whole_halves_rotate():
    assert head_order(RopeConfig(theta=1e4), 6, is_interleaved=False) is None
    assert head_order(None, 6, is_interleaved=True) is None


def test_what_does_not_rotate_keeps_its_numbers():
    rope = RopeConfig(theta=1e4, partial=0.5, attention_factor=3.0)
    cos, sin = RotaryEmbedding(rope, 8, 5, dtype=torch.float32, device=CPU).table.chunk(2, dim=1)
    assert torch.equal(cos[:, 2:], torch.ones(5, 2)) and torch.equal(sin[:, 2:], torch.zeros(5, 2))
    assert torch.equal(cos[0, :2], torch.full((2,), 3.0))
    nothing = RotaryEmbedding(None, 8, 5, dtype=torch.float32, device=CPU).table
    assert torch.equal(nothing, torch.tensor([[1.0] * 4 + [0.0] * 4]).expand(5, 8))
