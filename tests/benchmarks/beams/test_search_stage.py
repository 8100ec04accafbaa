"""The beam stage of the two-stage benchmark, in small, and what it takes for a difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.beams import search_stage
from benchmarks.common import models
from tests.doubles.benchmark_runs import run_benchmark


def search(*found: tuple[list[int], float], margin: float = 1.0) -> search_stage.Search:
    return search_stage.Search(sequences=[ids for ids, _ in found], scores=[score for _, score in found], seconds=0.0,
                        margin=margin)  # fmt: skip


A, B, C, D = [1, 2], [1, 3], [4, 2], [4, 3]


@pytest.mark.parametrize(
    ("other", "margin", "verdict"),
    [
        ([(A, -1.0), (B, -2.0), (C, -3.0)], 0.5, "equal"),
        ([(A, -1.0), (B, -2.0009), (C, -3.0)], 0.5, "equal"),
        ([(A, -1.0), (B, -2.0011), (C, -3.0)], 0.5, "different"),
        ([(A, -1.0), (C, -3.0), (B, -2.0)], 0.5, "different"),
        ([(A, -1.0), (B, -2.0), (D, -3.0)], 0.5, "different"),
        ([(A, -1.0), (B, -2.0), (D, -3.0)], 1e-5, "near tie"),
        ([(A, -1.0), (B, -2.0), (D, -3.0)], None, "not compared"),
        ([(A, -1.0), (B, -2.0)], 0.5, "different"),
        ([(D, -0.9), (A, -1.0), (B, -2.0)], 0.5, "different"),
    ],
)
def test_search_comparison_verdicts_are_symmetric(other, margin, verdict) -> None:
    ours = search((A, -1.0), (B, -2.0), (C, -3.0))
    assert search_stage.compare(ours, search(*other), margin)[0] == verdict
    assert search_stage.compare(search(*other), ours, margin)[0] == verdict


def test_near_ties_may_swap_neighbouring_results() -> None:
    ours = search((A, -1.0), (B, -2.00001), (C, -2.00002))
    swapped = search((A, -1.0), (C, -2.0), (B, -2.00001))
    assert search_stage.compare(ours, swapped, 0.5)[0] == "near tie"
    apart = search((A, -1.0), (C, -1.9999), (B, -2.00001))
    assert search_stage.compare(ours, apart, 0.5)[0] == "different"


def test_failures_report_missed_handoffs_and_different_results() -> None:
    ours, layer = (search_stage.BeamCell(name, 10, 2) for name in ("native", "serving layer"))
    ours.total, ours.paths = [1.0, 1.0], search_stage.Counter(handoff=2)
    layer.compared.update({"equal": 2, "near tie": 1})
    assert search_stage.failures([ours, layer]) == []
    layer.compared.update({"different": 1})
    ours.paths = search_stage.Counter(handoff=1, match=1)
    assert search_stage.failures([ours, layer]) == [
        "native, 2 at once: 1 pairs were not handed off",
        "serving layer, 2 at once: 1 searches found something else than ours",
    ]
    layer.compared = search_stage.Counter({"not compared": 2})
    assert search_stage.failures([layer]) == ["serving layer, 2 at once: no search was found to be equal to ours"]


@pytest.mark.slow
@pytest.mark.process
def test_native_serving_layer_and_transformers_find_equal_beams(tmp_path: Path) -> None:
    models.save_random_model(tmp_path, models.LLAMA_TINY)
    models.write_tokenizer(tmp_path, models.LLAMA_TINY["vocab_size"])
    lengths = ["--prompt-len", "40", "--stage1-tokens", "5", "--beam-width", "4", "--page-size", "16"]
    sizes = ["--concurrency", "2", "--pairs", "4", "--transformers", "2"]
    done = run_benchmark("serving.two_stage", "--model", str(tmp_path), *lengths, *sizes, "--plot", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = {cell["peer"]: cell for cell in json.loads((tmp_path / "two_stage_beams.json").read_text())["cells"]}
    ours, layer, transformers = (cells[name] for name in ("native", "serving layer", "transformers"))
    assert ours["paths"] == {"handoff": 4} and ours["computed"] == [4] * 4
    # The tree holds whole pages: 32 of the 48 tokens of the first request, 48 of the others.
    assert layer["computed"] == [16 + 4 * 1 + 4 * 2] * 4
    assert layer["compared"]["equal"] + layer["compared"].get("near tie", 0) == 4
    assert transformers["compared"]["equal"] + transformers["compared"].get("near tie", 0) == 2
    assert [len(cell["total"]) for cell in (ours, layer, transformers)] == [4, 4, 2]
    assert [len(cell["wall"]) for cell in (ours, layer, transformers)] == [2, 2, 1]
    assert (tmp_path / "two_stage_beams.png").read_bytes().startswith(b"\x89PNG")
