"""The mark ``one_in(n)`` of tests/conftest.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

SUITE = """
import pytest

@pytest.fixture(params=["f0", "f1", "f2"])
def fixture(request): ...

@pytest.mark.one_in(3)
@pytest.mark.parametrize(("first", "second"), [(1, 2), (3, 4), (5, 6)])
def test_pairs(fixture, first, second): ...

@pytest.mark.parametrize("value", [1, 2])
def test_unmarked(value): ...

@pytest.mark.one_in(2)
def test_without_parameters(): ...
"""


def test_one_in_keeps_each_value_on_a_diagonal(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    options = ["-p", "tests.conftest", "-c", str(TESTS.parent / "pyproject.toml"), f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", *options, "--collect-only", "-q", "-m", "not slow", str(tmp_path)]
    found = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=120)
    names = [line.partition("::")[2] for line in found.stdout.splitlines() if "::" in line]
    assert names == [
        "test_pairs[f0-1-2]",
        "test_pairs[f1-5-6]",
        "test_pairs[f2-3-4]",
        "test_unmarked[1]",
        "test_unmarked[2]",
        "test_without_parameters",
    ], found.stdout + found.stderr
