"""The two-stage benchmark, in small: every mode computes what it says it does."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from tests.doubles.benchmark_runs import run_benchmark

pytestmark = [pytest.mark.process, pytest.mark.slow]
run = functools.partial(run_benchmark, "serving.two_stage")


def test_each_mode_computes_the_expected_tokens(tmp_path: Path) -> None:
    done = run("--prompt-len", "60", "--stage1-tokens", "5", "--concurrency", "3", "--pairs", "6", out=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = {(c["mode"], c["pressed"]): c for c in json.loads((tmp_path / "two_stage.json").read_text())["cells"]}
    whole, suffix = 60 + 5 + 3, 3
    for key, cell in cells.items():
        assert len(cell["ttft"]) == 6, key
        assert len(cell["wall"]) == 2, key
        lost = key in {("replay", False), ("radix", True)}
        assert cell["computed"] == [whole if lost else suffix + 1] * 6, key
        assert cell["paths"] == ({"handoff": 6} if cell["mode"] == "continuation" else {}), key
    assert len(cells) == 5


def test_handoff_check_passes_under_memory_pressure(tmp_path: Path) -> None:
    done = run("--handoff-check", "150", "--page-sizes", "16", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
