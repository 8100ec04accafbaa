"""The study, on traces of a few hundred requests."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks.cache import eviction
from benchmarks.cache.eviction_report import Cell, Run, print_gates


def study(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["eviction", "--out", str(out), *words])
    eviction.main()


def test_study_reports_results_and_resumes_without_rerunning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, lines = random.Random(0), []
    for number in range(120):
        ids = [rng.randrange(8), 100 + rng.randrange(8), 1000 + number]
        lines.append({"timestamp": number, "input_length": 40, "output_length": 3, "hash_ids": ids})
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text("\n".join(map(json.dumps, lines)))
    words = ["--synthetic", "agents", "--seeds", "2", "--requests", "150", "--trace", str(recorded)]
    study(monkeypatch, tmp_path, *words, "--block-tokens", "16")
    said = capsys.readouterr().out
    assert "| agents | 10% | yes |" in said and "| recorded | 60% | no |" in said and "recorded | 60% | yes" not in said
    assert "never more than 0.3 points below lru" in said
    found = json.loads((tmp_path / "eviction.json").read_text())
    assert len(found["runs"]) == 2 * 3 * 11 + 3 * 6
    assert (tmp_path / "eviction.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(eviction, "replay", lambda *args, **kwargs: pytest.fail("it has been run"))
    study(monkeypatch, tmp_path, *words, "--block-tokens", "16")
    assert json.loads((tmp_path / "eviction.json").read_text())["runs"] == found["runs"]


def runs(learned: float, evict_us: float = 5.0) -> list[Run]:
    def run(order: str, hints: bool, rate: float, seed: int) -> Run:
        return Run("agents", seed, 100, 0.1, 1000, order, hints, rate + seed / 100, evict_us)

    found = [run("optimum", False, 0.8, seed) for seed in (0, 1)]
    for hints in (False, True):
        found += [run("lru", hints, 0.4, seed) for seed in (0, 1)]
        found += [run("learned", hints, learned, seed) for seed in (0, 1)]
    return found


def test_gap_to_optimum_is_reported_as_share_closed() -> None:
    cell = Cell(runs(learned=0.5))
    assert cell.closed("learned", True).mean == pytest.approx(0.25)
    assert cell.closed("learned", True).half_width == pytest.approx(0, abs=1e-9)
    assert cell.above_lru("learned", False).mean == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("learned", "evict_us", "missed"),
    [
        (0.53, 5.0, []),
        (0.53, 12.0, ["µs an eviction"]),
        (0.5, 5.0, ["agents at 10%"]),
        (0.39, 5.0, ["below lru", "closes 15%"]),
    ],
)
def test_missed_gates_are_printed(
    learned: float, evict_us: float, missed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    print_gates(runs(learned, evict_us))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("MISSED")]
    assert bool(lines) is bool(missed)
    assert all(any(words in line for line in lines) for words in missed)
