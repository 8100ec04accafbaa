"""The noise against a twin in numpy's uint32, and against the distributions it should have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.runtime.sampling.noise import draw_keys, exponential_noise


def slow_noise(key: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    multiplier, offset = (int(k) & 0xFFFFFFFF for k in key)
    noise = []
    for token_id in token_ids.tolist():
        h = (token_id * (multiplier | 1) + offset) & 0xFFFFFFFF
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h ^= h >> shift
            h = h * factor & 0xFFFFFFFF
        h ^= h >> 16
        uniform = np.float32((np.float32(h & 0x7FFFFFFF) + np.float32(0.5)) * np.float32(2.0**-31))
        noise.append(-np.log1p(-min(uniform, np.float32(1 - 2.0**-24))))
    return np.array(noise, dtype=np.float32)


def noise(seeds, positions, token_ids) -> np.ndarray:
    keys = torch.from_numpy(draw_keys(np.asarray(seeds, dtype=np.uint64), np.asarray(positions)))
    return exponential_noise(keys, torch.as_tensor(token_ids, dtype=torch.int32)).numpy()


@pytest.mark.parametrize("length", [1, 7, 8, 33, 1000])
def test_noise_equals_numpy_twin_at_any_length(length):
    seeds, positions = [0, 1, 2**63 + 511], [0, 5, 131071]
    ids = np.arange(151_000, 151_000 + length)
    keys = draw_keys(np.array(seeds, dtype=np.uint64), np.array(positions))
    expected = np.stack([slow_noise(key, ids) for key in keys])
    np.testing.assert_allclose(noise(seeds, positions, ids), expected, rtol=1e-6)


def test_noise_depends_on_token_id_not_vector_position():
    ids = np.random.default_rng(0).permutation(5000)
    assert np.array_equal(noise([7], [3], ids)[0], noise([7], [3], np.arange(5000))[0, ids])


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [(np.arange(50), np.zeros(50)), (np.full(50, 11), np.arange(50))],
    ids=["many seeds", "many positions"],
)
def test_noise_is_exponential(seeds, positions):
    """Kolmogorov-Smirnov over 50 draws of 4000 tokens; 1.95 / sqrt(n) is passed by chance in one of 1000 runs."""
    sample = np.sort(noise(seeds, positions.astype(np.int64), np.arange(4000)).ravel().astype(np.float64))
    assert sample[0] > 0.0 and np.isfinite(sample).all()
    n = len(sample)
    distance = np.abs(-np.expm1(-sample) - (np.arange(n) + 0.5) / n).max()
    assert distance < 1.95 / np.sqrt(n)


def test_noise_of_neighbours_is_uncorrelated():
    """Uniforms of neighbouring ids, positions and seeds; each correlation of n pairs is ~ N(0, 1 / n)."""
    ids = np.arange(2000)
    grid = -np.expm1(-noise(np.repeat(np.arange(20), 20), np.tile(np.arange(20), 20), ids).astype(np.float64))
    grid = grid.reshape(20, 20, 2000)
    for lag in (1, 2, 8):
        for axis in range(3):
            a = np.moveaxis(grid, axis, 0)
            pairs = np.corrcoef(a[lag:].ravel(), a[:-lag].ravel())[0, 1]
            assert abs(pairs) < 4.0 / np.sqrt(a[lag:].size), f"axis {axis} (seed, position, id), lag {lag}"


def test_keys_of_seeds_and_positions_do_not_collide():
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    keys = draw_keys(seeds.ravel(), positions.ravel())
    assert len(np.unique(keys, axis=0)) == 300 * 300
