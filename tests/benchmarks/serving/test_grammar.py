"""The benchmark of structured output, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.doubles.benchmark_runs import run_benchmark


@pytest.mark.slow
@pytest.mark.process
def test_grammar_benchmark_measures_every_part(tmp_path: Path) -> None:
    done = run_benchmark("serving.grammar", "--quick", out=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "grammar.json").read_text())["results"]
    assert list(results) == ["step", "masks", "compile", "forward", "peers"]
    (step,), (forward,), (peers,) = results["step"], results["forward"], results["peers"]
    assert {(cell["constraint"], cell["batch"]) for cell in step["cells"]} == {
        (constraint, batch) for constraint in ("schema", "items") for batch in (1, 4)
    }
    assert 0 < step["beams"]["masks_ms"] < step["beams"]["held_ms"]
    assert all(row["count"] > 0 for row in results["masks"])
    assert all(row["cached"]["median_us"] < row["cold"]["median_us"] for row in results["compile"])
    assert all(0 < row["forced_share"] < 1 for row in forward["rows"])
    baton = peers["grammars"][0]
    assert baton["peer"] == "Baton" and baton["finished"] > 0 and baton["invalid"] == 0
