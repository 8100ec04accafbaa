"""The benchmark of speculation, in small, on both kinds of transcripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.doubles.benchmark_runs import ROOT, run_benchmark


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("work", ["the toy model's", "edits", "stories"])
def test_speculation_benchmark_accepts_drafts(work: str, tmp_path: Path) -> None:
    sizes = ["--sessions", "2", "--turns", "2", "--at-once", "1", "2", "--rounds", "1", "--tokens", "40"]
    if work == "stories":
        sizes += ["--work", "stories"]
    elif work == "edits":  # another folder is another model
        toy = tmp_path / "model"
        toy.mkdir()
        for file in (ROOT / "examples" / "toy_model").glob("*.*"):
            (toy / file.name).symlink_to(file)
        sizes += ["--model", str(toy)]
    done = run_benchmark("serving.speculation", *sizes, out=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = {(c["way"], c["at_once"]): c for c in json.loads((tmp_path / "speculation.json").read_text())["cells"]}
    assert len(cells) == 4
    for at_once in (1, 2):
        on, off = cells["NGRAM", at_once], cells["off", at_once]
        assert 0 < on["drafted"] >= on["accepted"] and off["drafted"] == 0
        assert on["tokens_per_step"][0] >= off["tokens_per_step"][0] == 1.0
        assert on["accepted"] > 0 or work == "stories"
    assert "accepted" in done.stdout
