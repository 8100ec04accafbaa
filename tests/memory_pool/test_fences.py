"""Fences are names: each is used once, and ends whenever its operation does."""

from __future__ import annotations

import pytest

from baton.memory_pool.fences import Fences


def test_fences_close_in_any_order() -> None:
    fences = Fences()
    first, second, third = (fences.open_fence() for _ in range(3))
    fences.close_fence(second)
    assert [fences.is_open(fence) for fence in (first, second, third)] == [True, False, True]
    assert len(fences) == 2 and len({first, second, third, fences.open_fence()}) == 4


def test_fence_closes_only_once() -> None:
    fences = Fences()
    fence = fences.open_fence()
    fences.close_fence(fence)
    with pytest.raises(KeyError):
        fences.close_fence(fence)
    assert not fences.is_open(fence + 1)
