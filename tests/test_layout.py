"""Lines of documentation stay short enough for a terminal and a diff."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_COLUMNS = 120


def test_doc_lines_are_short_enough() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    long = [
        f"{name}:{number}"
        for name in listed.stdout.split()
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS and not line.startswith("|") and "](" not in line
    ]
    assert not long
