"""Benchmarks are modules of one package; none needs its own folder on the path."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest

from benchmarks.common.measured import RESULTS

ROOT = Path(__file__).parents[2]
FILES = [file.relative_to(ROOT).with_suffix("") for file in (ROOT / "benchmarks").rglob("*.py")]
NAMES = sorted(".".join(file.parts) for file in FILES if file.name != "__init__")


@pytest.mark.parametrize("name", NAMES)
def test_every_module_imports_under_its_own_name(name: str) -> None:
    assert importlib.import_module(name).__name__ == name


def test_git_ignores_benchmark_results() -> None:
    assert RESULTS == ROOT / "benchmarks" / "results"
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    asked = ["git", "-C", str(ROOT), "check-ignore", "--quiet", str(RESULTS / "some.json")]
    assert subprocess.run(asked).returncode == 0
