"""The benchmark of the pages that a search holds."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def beam_memory(monkeypatch: pytest.MonkeyPatch):
    """benchmarks/ is a folder of scripts, not a package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("beam_memory")
    del sys.modules["beam_memory"]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_searches_keep_to_their_limit(beam_memory, page_size: int) -> None:
    cases = [beam_memory.measure(8, steps=4, page_size=page_size, forks=forks, seed=1) for forks in beam_memory.FORKS]
    for case in cases:
        assert case.failure is None, case
        # Nobody but the beams holds anything, and they differ at least in the page that they fill.
        assert 8 <= case.group == case.pool
    assert cases[-1].forks == "each"
    assert cases[-1].group == 8 * -(-(beam_memory.PREFIX % page_size + 3) // page_size)


def test_too_many_pages_are_a_failure(beam_memory) -> None:
    case = beam_memory.measure(width=4, steps=3, page_size=1, forks="random", seed=2)
    assert dataclasses.replace(case, pool=case.limit + 1).failure == "13 pages are more than 12"
    assert dataclasses.replace(case, left=2).failure == "2 pages were left behind"
