from __future__ import annotations

import pytest

from benchmarks.core.window_pools import GIB, SHAPES, Shape, measure, rank


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("requests", [8, 64])
def test_the_plan_says_the_bytes_of_both_pools_and_what_they_gain(shape: Shape, requests: int) -> None:
    found = measure(shape, 8 * GIB, requests, 8192)
    assert found.bytes_of_one == found.one.kv_bytes
    assert found.bytes_of_two == found.two.kv_bytes + found.two.window_bytes
    assert 0.99 < found.bytes_of_two / found.bytes_of_one < 1.01
    full, windows = shape.full_layers, shape.layers - shape.full_layers
    assert 0.99 * shape.layers / (full + 0.2 * windows) < found.gain < shape.layers / full


def test_evictions_rank_every_node() -> None:
    nodes, seconds = rank(20)
    assert 20 <= nodes <= 22 and seconds > 0
