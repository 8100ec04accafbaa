"""What a mutation run found, as a table: one row for each folder, then the sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePath

COLUMNS = ("mutants", "killed", "timeout", "survived", "no tests", "not run", "score")


def count_by_folder(status_by_file: Mapping[str, Iterable[str]]) -> dict[str, Counter[str]]:
    """status_by_file: for each file, what mutmut says of each of its mutants. Folders in the order of their names."""
    found: dict[str, Counter[str]] = {}
    for file, statuses in sorted(status_by_file.items()):
        found.setdefault(str(PurePath(file).parent), Counter()).update(statuses)
    return {folder: counts for folder, counts in found.items() if counts}


def score(counts: Counter[str]) -> float:
    """The share of the mutants that were run that did not survive, in percent. One that no test reaches survives, and
    so does one for which mutmut has any other word."""
    run = counts.total() - counts["not checked"]
    return 100.0 * (counts["killed"] + counts["timeout"]) / run if run else 0.0


def score_table(by_folder: Mapping[str, Counter[str]]) -> str:
    """A table in markdown."""
    lines = [f"| folder | {' | '.join(COLUMNS)} |", "|---" + "|---:" * len(COLUMNS) + "|"]
    total: Counter[str] = Counter()
    for folder, counts in by_folder.items():
        total.update(counts)
        lines.append(_row(f"`{folder}/`", counts))
    return "\n".join([*lines, _row("all", total)])


def _row(name: str, counts: Counter[str]) -> str:
    known = ("killed", "timeout", "no tests", "not checked")
    survived = counts.total() - sum(counts[status] for status in known)
    numbers = (counts.total(), counts["killed"], counts["timeout"], survived, counts["no tests"], counts["not checked"])
    return f"| {name} | {' | '.join(map(str, numbers))} | {score(counts):.1f} % |"
