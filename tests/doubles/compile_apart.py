"""Run code that compiles Triton kernels (see triton_compile) in a process of its own: this one may interpret them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DOUBLES = Path(__file__).parent


def compile_apart(code: str, capability: int, cache: Path) -> str:
    """What ``code`` prints; it finds the capability in sys.argv[1]. cache: a folder for what is compiled."""
    pytest.importorskip("triton")
    paths = [str(DOUBLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", code, str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
