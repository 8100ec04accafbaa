"""What a mutation run found, as a table: one row for each folder, then all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import sqrt
from pathlib import PurePath

COLUMNS = ("mutants", "run", "killed", "timeout", "survived", "no tests", "score", "95 % interval")
Z = 1.96


def count_by_folder(status_by_file: Mapping[str, Iterable[str]]) -> dict[str, Counter[str]]:
    """status_by_file: for each file, what mutmut says of each of its mutants. Folders in the order of their names."""
    found: dict[str, Counter[str]] = {}
    for file, statuses in sorted(status_by_file.items()):
        found.setdefault(str(PurePath(file).parent), Counter()).update(statuses)
    return {folder: counts for folder, counts in found.items() if counts}


def count_run(counts: Counter[str]) -> int:
    return counts.total() - counts["not checked"]


def score(counts: Counter[str]) -> float:
    """The share of the mutants that were run that did not survive, in percent. One that no test reaches survives, and
    so does one for which mutmut has any other word."""
    run = count_run(counts)
    return 100.0 * (counts["killed"] + counts["timeout"]) / run if run else 0.0


def score_of_all(by_folder: Iterable[Counter[str]]) -> tuple[float, float, float]:
    """The score to expect of all mutants of these folders, and where it lies with 95 % certainty, from the samples of
    them that were run: folders weigh by their mutants, not by their samples. Those of which none was run are left out.

    The interval is the normal one of a stratified sample without replacement. For its width each folder has two
    mutants more of either kind (Agresti and Coull), so that a small sample without survivors is not certain."""
    strata = [counts for counts in by_folder if count_run(counts)]
    total = sum(counts.total() for counts in strata)
    middle = variance = 0.0
    for counts in strata:
        weight, run = counts.total() / total, count_run(counts)
        middle += weight * score(counts)
        share = (score(counts) / 100 * run + 2) / (run + 4)
        variance += weight**2 * share * (1 - share) / (run + 4) * (1 - run / counts.total())
    half = 100 * Z * sqrt(variance)
    return middle, max(0.0, middle - half), min(100.0, middle + half)


def score_table(by_folder: Mapping[str, Counter[str]]) -> str:
    """A table in markdown."""
    lines = [f"| folder | {' | '.join(COLUMNS)} |", "|---" + "|---:" * len(COLUMNS) + "|"]
    lines += [_row(f"`{folder}/`", counts, [counts]) for folder, counts in by_folder.items()]
    return "\n".join([*lines, _row("all", sum(by_folder.values(), Counter()), list(by_folder.values()))])


def _row(name: str, counts: Counter[str], strata: list[Counter[str]]) -> str:
    run = count_run(counts)
    survived = run - sum(counts[status] for status in ("killed", "timeout", "no tests"))
    numbers = (counts.total(), run, counts["killed"], counts["timeout"], survived, counts["no tests"])
    if not run:
        found = "| |"
    elif run == counts.total():
        found = f"{score(counts):.1f} % | exact |"
    else:
        middle, low, high = score_of_all(strata)
        found = f"{middle:.1f} % | {low:.0f}–{high:.0f} % |"
    return f"| {name} | {' | '.join(map(str, numbers))} | {found}"
