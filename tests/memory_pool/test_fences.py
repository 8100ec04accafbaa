"""Fences are names: each is used once, and ends whenever its operation does."""

from __future__ import annotations

import pytest

from baton.memory_pool.fences import Fences


def test_operations_end_in_any_order() -> None:
    fences = Fences()
    first, second, third = (fences.open() for _ in range(3))
    fences.close(second)
    assert [fences.is_open(fence) for fence in (first, second, third)] == [True, False, True]
    assert len(fences) == 2 and len({first, second, third, fences.open()}) == 4


def test_an_operation_ends_once() -> None:
    fences = Fences()
    fence = fences.open()
    fences.close(fence)
    with pytest.raises(KeyError):
        fences.close(fence)
    assert not fences.is_open(fence + 1)
