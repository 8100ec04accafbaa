"""The two-stage example runs as a newcomer would run it, and its second stage takes over what the first computed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_stage.py"


def test_two_stage() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    came = re.search(r"path (\w+): (\d+) tokens inherited, (\d+) of them recomputed; (\d+) new", done.stdout)
    assert came is not None, done.stdout
    path, inherited, recomputed, new = came[1], int(came[2]), int(came[3]), int(came[4])
    assert path == "handoff" and inherited > 80 and recomputed <= 1 and new <= 5
    assert re.search(r"item \| (<s_[abc]_\d+>){3}\n +\| \w+ \w+ \([a-z ]+\)", done.stdout), done.stdout
