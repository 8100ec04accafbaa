"""The benchmarks with --gpu, on a CPU and in small: the same code, end to end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.doubles.benchmark_runs import run_benchmark

pytestmark = [pytest.mark.process, pytest.mark.slow]

SMALL = ("--gpu", "--device", "cpu", "--shape", "llama-tiny", "--rounds", "2", "--profile", "--plot")


def checked(done: subprocess.CompletedProcess[str], result: Path, name: str) -> dict:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attention torch_native, CUDA graphs off, overlap off" in done.stdout, "the table says what was measured"
    assert "not measured" not in done.stdout, "published figures are of another shape"
    assert result.with_suffix(".png").stat().st_size > 1000
    report = json.loads(result.read_text())
    assert report["torch"] == torch.__version__ and report["worker"]["device"] == "cpu"
    assert report["command"].startswith(f"python -m benchmarks.{name} --gpu ")
    assert "not measured" in report["peer"]
    return report


def test_offline_benchmark_runs_end_to_end(tmp_path: Path) -> None:
    sizes = ("--batch-sizes", "1", "3", "--prompt-lens", "40", "--steps", "6")
    done = run_benchmark("serving.offline", *SMALL, *sizes, out=tmp_path)
    report = checked(done, tmp_path / "gpu_offline.json", "serving.offline")
    assert [cell["batch_size"] for cell in report["cells"]] == [1, 3]
    for cell in report["cells"]:
        assert len(cell["static_prefill"]) == len(cell["loop_prefill"]) == 2
        assert len(cell["static_step"]) == 2 * 6 and 2 <= len(cell["loop_step"]) <= 2 * 5
        assert cell["goal_step_ms"] is None
    assert report["profiles"]["decode 3"]["rows"]["max"] == 3


def test_two_stage_benchmark_runs_end_to_end(tmp_path: Path) -> None:
    lengths = ("--prompt-len", "30", "--stage1-tokens", "5", "--beam-width", "4", "--beam-steps", "3")
    sizes = ("--concurrency", "1", "3", "--beam-concurrency", "3", "--pairs", "2")
    done = run_benchmark("serving.two_stage", *SMALL, "--http", *lengths, *sizes, out=tmp_path)
    for name in ("gpu_two_stage", "gpu_two_stage_http"):
        report = checked(done, tmp_path / f"{name}.json", "serving.two_stage")
        one, three = report["cells"]
        assert one["computed"] == [5] * 2 and one["paths"] == {"handoff": 2} and not one["beam"]
        assert three["computed"] == [5] * 6 and three["paths"] == {"handoff": 12} and len(three["beam"]) == 6
        assert set(report["profiles"]) >= {"stage 2, 1, extend", "beam, 3, decode"}
        assert (tmp_path / f"{name}.txt").read_text().strip() in done.stdout


def test_missing_gpu_is_refused_with_alternative(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for name in ("serving.offline", "serving.two_stage"):
        done = run_benchmark(name, "--gpu", out=tmp_path)
        assert done.returncode == 2 and "no CUDA device; --device cpu --shape llama-tiny" in done.stderr


def test_flags_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    for name, flags, said in (
        ("serving.offline", ("--gpu", "--cpu-time"), "--cpu-time is not for a GPU"),
        ("serving.offline", ("--profile",), "--profile is for a GPU; say --gpu, too"),
        ("serving.two_stage", ("--gpu", "--modes", "radix"), "--modes is not for a GPU"),
        ("serving.two_stage", ("--http",), "--http is for a GPU; say --gpu, too"),
    ):
        done = run_benchmark(name, *flags, out=tmp_path)
        assert done.returncode == 2 and said in done.stderr, done.stderr
