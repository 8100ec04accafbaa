"""Which tests a mutation run leaves out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutants.fewer import KEPT, is_kept

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", KEPT)
def test_every_kept_name_is_a_test(name: str) -> None:
    path, *_, function = name.split("::")
    assert re.search(rf"def {function}\(", (ROOT / path).read_text())


def test_listed_parameters_are_kept() -> None:
    simulation = "tests/scheduler/test_simulation.py::test_simulation"
    assert is_kept(f"{simulation}[1-1-plain]")
    assert not is_kept(f"{simulation}[1-1-plain-more]")
    assert not is_kept(f"{simulation}[1-64-plain]")


def test_name_listed_without_parameters_is_left_out() -> None:
    assert not is_kept("tests/radix/eviction/test_order.py::test_100_000_leaves_are_popped_in_order")


def test_unlisted_tests_are_kept() -> None:
    assert is_kept("tests/scheduler/test_simulation.py::test_another[3-3]")
    assert is_kept("tests/radix/eviction/test_order.py::test_eviction")
