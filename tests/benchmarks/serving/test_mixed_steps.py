"""The benchmark of mixed steps, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.doubles.benchmark_runs import run_benchmark


@pytest.mark.slow
@pytest.mark.process
def test_mixed_steps_need_fewer_steps_than_plain(tmp_path: Path) -> None:
    sizes = ("--shape", "llama-tiny", "--prompt-lens", "20", "90", "--chunk", "32", "--tokens", "13", "--rounds", "1")
    done = run_benchmark("serving.mixed_steps", *sizes, out=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = {(c["way"], c["prompt_len"]): c for c in json.loads((tmp_path / "mixed_steps.json").read_text())["cells"]}
    assert len(cells) == 4
    for length in (20, 90):
        assert cells["mixed", length]["steps"] < cells["plain", length]["steps"]
    assert "mixed " in done.stdout
