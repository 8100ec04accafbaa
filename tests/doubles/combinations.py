"""Combinations of parameters for tests that would take too long with all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def product(names: str, *values: Iterable[Any]) -> pytest.MarkDecorator:
    """All combinations of three or more values. Half of them are not slow: all pairs of two values are among these.
    names: separated by commas."""
    lists = [list(each) for each in values]
    cases = []
    for places in itertools.product(*(range(len(each)) for each in lists)):
        case = [each[place] for each, place in zip(lists, places)]
        cases.append(pytest.param(*case, marks=[pytest.mark.slow] * (sum(places) % 2)))
    return pytest.mark.parametrize(names, cases)
