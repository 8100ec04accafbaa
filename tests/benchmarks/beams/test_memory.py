"""The benchmark of the pages that a search holds."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.beams import memory


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_beam_search_memory_stays_within_limit(page_size: int) -> None:
    cases = [memory.measure(8, steps=4, page_size=page_size, forks=forks, seed=1) for forks in memory.FORKS]
    for case in cases:
        assert case.failure is None, case
        # Only the beams hold memory, and they differ at least in the page that they fill.
        assert 8 <= case.group == case.pool
    assert cases[-1].forks == "each"
    assert cases[-1].group == 8 * -(-(memory.PREFIX % page_size + 3) // page_size)


def test_excess_or_leaked_pages_are_reported_as_failure() -> None:
    case = memory.measure(width=4, steps=3, page_size=1, forks="random", seed=2)
    assert dataclasses.replace(case, pool=case.limit + 1).failure == "13 pages are more than 12"
    assert dataclasses.replace(case, left=2).failure == "2 pages were left behind"
