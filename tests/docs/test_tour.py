"""docs/tour.md shows what really happens: its figures are what examples/tour.py prints today."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tour.md"


def test_tour_page_figures_match_the_script() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "tour.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    printed = figures(done.stdout)
    assert len(printed) > 15
    for on_page, from_script in zip(figures(PAGE.read_text()), printed, strict=True):
        assert on_page == from_script, "refresh the page with: python examples/tour.py --write"


def figures(text: str) -> list[str]:
    """Each from its mark to its closing fence."""
    return [part.partition("\n```\n")[0] for part in text.split("<!-- figure: ")[1:]]
