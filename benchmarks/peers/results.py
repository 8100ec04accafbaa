"""The measurements, failures and skipped units; written to JSON after every unit, so that a run can be resumed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
SAME = ("commit", "processor", "level", "cores", "seed", "quick")
"""Facts that must be the same in all runs of one table."""


class Results:
    def __init__(self, file: Path, about: Row, *, resume: bool) -> None:
        """Raises ValueError if what is to be gone on with was measured elsewhere, or with something else."""
        self.file = file
        self.report: Row = {"runs": [], "engines": {}, "skipped": {}, "warnings": []}
        self.report |= {"rows": [], "failures": [], "agreement": []}
        if resume and file.exists():
            self.report = json.loads(file.read_text())
            other = self.report["runs"][-1]
            changed = [
                f"{key} {other.get(key)!r} before, {about.get(key)!r} now"
                for key in SAME
                if other.get(key) != about.get(key)
            ]
            if changed:
                raise ValueError(f"{file} cannot be gone on with: {'; '.join(changed)}")
            self.report |= {"skipped": {}, "failures": []}  # what failed is tried again
        self.report["runs"].append(about)

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.report, indent=1) + "\n")
        part.replace(self.file)

    # -- what is known -------------------------------------------------------------------------------------------------

    def done(self, place: Row, engine: str) -> bool:
        """True if an engine has been measured at a place ({model, dtype, unit, round})."""
        wanted = place | {"engine": engine}
        return any(wanted.items() <= row.items() for row in self.report["rows"])

    def failed(self, model: str, dtype: str, unit: str, engine: str) -> Row | None:
        for failure in self.report["failures"]:
            where = [failure[key] for key in ("model", "dtype", "unit", "engine")]
            if where in ([model, dtype, unit, engine], [model, dtype, "", engine]):
                return failure
        return None

    def values(self, model: str, dtype: str, metric: str) -> dict[str, float]:
        """Median of each engine's rounds."""
        return {engine: median(values) for engine, values in self.all_values(model, dtype, metric).items()}

    def all_values(self, model: str, dtype: str, metric: str) -> dict[str, list[float]]:
        """The figure of each round, by engine."""
        rounds: dict[str, list[float]] = {}
        for row in self.report["rows"]:
            if (row["model"], row["dtype"], row["metric"]) == (model, dtype, metric):
                rounds.setdefault(row["engine"], []).append(row["value"])
        return rounds

    def rounds(self) -> int:
        """The least number of rounds of any figure."""
        counts: dict[tuple[str, ...], int] = {}
        for row in self.report["rows"]:
            key = tuple(row[name] for name in ("model", "dtype", "metric", "engine"))
            counts[key] = counts.get(key, 0) + 1
        return min(counts.values(), default=0)

    # -- what comes in -------------------------------------------------------------------------------------------------

    def add_figures(self, place: Row, engine: str, figures: dict[str, float], extra: Row, load: float) -> None:
        for metric, value in figures.items():
            row = {**place, "engine": engine, "metric": metric, "value": value, "load": round(load, 2)}
            self.report["rows"].append(row)
        if extra:
            self.report["rows"][-1]["extra"] = extra

    def fail(self, place: Row, engine: str, reason: str, last_lines: Sequence[str]) -> None:
        """place: with unit "" where the engine could not take part at all."""
        lines = [without_folders(line) for line in last_lines]
        self.report["failures"].append(
            {**place, "engine": engine, "reason": without_folders(reason), "last_lines": lines}
        )

    def warn(self, where: str, lines: Sequence[str]) -> None:
        """Add Baton's warnings at its start, such as a machine too busy for its trials."""
        new = [f"{where}: {without_folders(line)}" for line in lines]
        self.report["warnings"] += [line for line in new if line not in self.report["warnings"]]

    def agree(self, place: Row, engine: str, equal: float) -> None:
        self.report["agreement"].append({**place, "engine": engine, "equal": equal})


def without_folders(text: str) -> str:
    """Absolute paths cut to their last part: results are passed on."""
    return re.sub(r"(?<![\w.:/])/(?:[^\s/:'\",]+/)+", "…/", text)


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of tokens that are equal up to each output's first difference: after it, they are different texts. Random
    weights leave ties that rounding decides."""
    equal = total = 0
    for mine, other in zip(ours, theirs, strict=True):
        total += len(mine)
        for a, b in zip(mine, other, strict=True):
            if a != b:
                break
            equal += 1
    return equal / total
