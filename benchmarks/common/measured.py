"""The folder for results, and the origin of each result: commit, device, versions, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
"""Where every benchmark writes, unless --out names another folder. Git ignores it."""


def about_this_run(device: str) -> dict[str, Any]:
    """JSON. device: cpu or cuda, what the run used."""
    import torch  # here: benchmarks of the bookkeeping need none of it

    about: dict[str, Any] = {
        "commit": commit(),
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }
    if device == "cuda":
        about["cuda"] = torch.version.cuda
    return about


def commit() -> str | None:
    """Short hash, with a + where files have changed since; None outside a repository."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
