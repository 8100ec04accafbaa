"""The benchmarks with --gpu, on a CPU and in small: the same code, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.process


def run(script: str, *arguments: str, out: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--out", str(out)]
    return subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=150
    )


SMALL = ("--gpu", "--device", "cpu", "--shape", "llama-tiny", "--rounds", "2", "--profile", "--plot")


def checked(done: subprocess.CompletedProcess, result: Path) -> dict:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attention torch_native, CUDA graphs off, overlap off" in done.stdout, "the table says what was measured"
    assert "not measured" not in done.stdout, "published figures are of another shape"
    assert result.with_suffix(".png").stat().st_size > 1000
    report = json.loads(result.read_text())
    assert report["torch"] == torch.__version__ and report["worker"]["device"] == "cpu"
    assert str(BENCHMARKS) in report["command"] and "not measured" in report["peer"]
    return report


def test_plain_serving(tmp_path: Path) -> None:
    sizes = ("--batch-sizes", "1", "3", "--prompt-lens", "40", "--steps", "6")
    report = checked(run("offline.py", *SMALL, *sizes, out=tmp_path), tmp_path / "gpu_offline.json")
    assert [cell["batch_size"] for cell in report["cells"]] == [1, 3]
    for cell in report["cells"]:
        assert len(cell["static_prefill"]) == len(cell["loop_prefill"]) == 2
        assert len(cell["static_step"]) == 2 * 6 and 2 <= len(cell["loop_step"]) <= 2 * 5
        assert cell["goal_step_ms"] is None
    assert report["profiles"]["decode 3"]["rows"]["max"] == 3


def test_two_stages(tmp_path: Path) -> None:
    lengths = ("--prompt-len", "30", "--stage1-tokens", "5", "--beam-width", "4", "--beam-steps", "3")
    sizes = ("--concurrency", "1", "3", "--beam-concurrency", "3", "--pairs", "2")
    done = run("two_stage.py", *SMALL, "--http", *lengths, *sizes, out=tmp_path)
    for name in ("gpu_two_stage", "gpu_two_stage_http"):
        report = checked(done, tmp_path / f"{name}.json")
        one, three = report["cells"]
        assert one["computed"] == [5] * 2 and one["paths"] == {"handoff": 2} and not one["beam"]
        assert three["computed"] == [5] * 6 and three["paths"] == {"handoff": 12} and len(three["beam"]) == 6
        assert set(report["profiles"]) >= {"stage 2, 1, extend", "beam, 3, decode"}
        assert (tmp_path / f"{name}.txt").read_text().strip() in done.stdout


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for script in ("offline.py", "two_stage.py"):
        done = run(script, "--gpu", out=tmp_path)
        assert done.returncode == 2 and "no CUDA device; --device cpu --shape llama-tiny" in done.stderr


def test_host_time(tmp_path: Path) -> None:
    done = run("host_time.py", "--batch-sizes", "1", "3", "--beam-sizes", "2", "--steps", "8", "--plot", out=tmp_path)
    assert done.returncode == 0, done.stderr
    cases = json.loads((tmp_path / "host_time.json").read_text())["cases"]
    assert cases["decode 3"]["rows"] == {"min": 3, "median": 3.0, "max": 3}
    assert cases["extend 3"]["new_tokens"] == {"min": 27, "median": 27.0, "max": 27}
    assert cases["beam 2"]["rows"]["max"] == 2 * 32
    assert (tmp_path / "host_time.png").exists()
