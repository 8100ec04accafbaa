"""The benchmark of the host's time, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.doubles.benchmark_runs import run_benchmark


@pytest.mark.slow
@pytest.mark.process
def test_host_time(tmp_path: Path) -> None:
    sizes = ("--batch-sizes", "1", "3", "--beam-sizes", "2", "--steps", "8")
    done = run_benchmark("core.host_time", *sizes, "--plot", out=tmp_path)
    assert done.returncode == 0, done.stderr
    cases = json.loads((tmp_path / "host_time.json").read_text())["cases"]
    assert cases["decode 3"]["rows"] == {"min": 3, "median": 3.0, "max": 3}
    assert cases["extend 3"]["new_tokens"] == {"min": 27, "median": 27.0, "max": 27}
    assert cases["beam 2"]["rows"]["max"] == 2 * 32
    assert (tmp_path / "host_time.png").exists()
