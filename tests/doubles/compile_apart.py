"""Run code that compiles Triton kernels (see triton_compile) in a process of its own: this one may interpret them.

One process for several generations of cards: to import torch and Triton takes longer than most kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compile_apart(code: str, cache: Path, capabilities: tuple[int, ...]) -> dict[int, str]:
    """Capability -> the output of ``code``, which finds it in ``capability``. cache: a folder for compiled kernels."""
    pytest.importorskip("triton")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("TRITON_INTERPRET", None)
    each = "".join(f"capability = {capability}\n{code}\nprint(end='\\0')\n" for capability in capabilities)
    done = subprocess.run([sys.executable, "-c", each], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(zip(capabilities, map(str.strip, done.stdout.split("\0")[:-1]), strict=True))
