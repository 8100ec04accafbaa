"""The table of a mutation run."""

from __future__ import annotations

from collections import Counter

from tests.mutants import scores


def test_what_survives_is_whatever_was_run_and_not_killed() -> None:
    counts = Counter({"killed": 6, "timeout": 1, "survived": 1, "suspicious": 1, "no tests": 1, "not checked": 10})
    assert scores.score(counts) == 70.0
    assert scores.score_table({"radix": counts}).splitlines()[-1] == "| all | 20 | 6 | 1 | 2 | 1 | 10 | 70.0 % |"


def test_a_folder_of_which_nothing_was_run_has_no_score() -> None:
    assert scores.score(Counter({"not checked": 3})) == 0.0


def test_files_are_counted_with_their_folder() -> None:
    found = {"radix/tree.py": ["killed"], "radix/node.py": ["killed", "survived"], "radix/__init__.py": []}
    by_folder = scores.count_by_folder(found | {"scheduler/beam/rows.py": ["survived"], "empty/none.py": []})
    assert by_folder == {"radix": {"killed": 2, "survived": 1}, "scheduler/beam": {"survived": 1}}
    table = scores.score_table(by_folder).splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| `radix/`", "| `scheduler/beam/`", "| all"]
