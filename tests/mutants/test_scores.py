"""The table of a mutation run."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants import scores


def test_every_mutant_run_and_not_killed_counts_as_survived() -> None:
    counts = Counter({"killed": 6, "timeout": 1, "survived": 1, "suspicious": 1, "no tests": 1})
    assert scores.score(counts) == 70.0
    last = scores.score_table({"radix": counts}).splitlines()[-1]
    assert last == "| all | 10 | 10 | 6 | 1 | 2 | 1 | 70.0 % | exact |"


def test_folder_without_runs_has_no_score() -> None:
    assert scores.score(Counter({"not checked": 3})) == 0.0
    assert scores.score_table({"radix": Counter({"not checked": 3})}).splitlines()[-1].endswith("| 0 | 0 | | |")


def test_file_counts_are_summed_by_folder() -> None:
    found = {"radix/tree.py": ["killed"], "radix/node.py": ["killed", "survived"], "radix/__init__.py": []}
    by_folder = scores.count_by_folder(found | {"scheduler/beam/rows.py": ["survived"], "empty/none.py": []})
    assert by_folder == {"radix": {"killed": 2, "survived": 1}, "scheduler/beam": {"survived": 1}}
    table = scores.score_table(by_folder).splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| `radix/`", "| `scheduler/beam/`", "| all"]


def test_sampled_score_has_an_interval() -> None:
    counts = Counter({"killed": 90, "survived": 10, "not checked": 900})
    middle, low, high = scores.score_of_all([counts])
    assert middle == pytest.approx(90.0)
    assert (90.0 - low, high - 90.0) == pytest.approx((5.825, 5.825), abs=0.001)
    assert "| 90.0 % | 84–96 % |" in scores.score_table({"radix": counts})


def test_sample_without_survivors_has_an_interval() -> None:
    _, low, high = scores.score_of_all([Counter({"killed": 20, "not checked": 980})])
    assert low < 90.0 and high == 100.0


def test_folders_are_weighted_by_their_mutants() -> None:
    small = Counter({"killed": 100})
    large = Counter({"killed": 5, "survived": 5, "not checked": 290})
    middle, low, high = scores.score_of_all([small, large, Counter({"not checked": 5000})])
    assert middle == pytest.approx(0.25 * 100 + 0.75 * 50)
    assert low < 45 and high > 80


def test_exhaustive_run_has_no_interval() -> None:
    assert scores.score_of_all([Counter({"killed": 3, "survived": 1})]) == (75.0, 75.0, 75.0)
