"""Benchmarks run as a user runs them: `python -m benchmarks.<room>.<name>` from the repository root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_benchmark(name: str, *arguments: str, out: Path, limit_s: float = 150) -> subprocess.CompletedProcess[str]:
    """name: room and module, such as ``serving.two_stage``; out: the folder for its results. One thread.
    limit_s: seconds it may take."""
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
