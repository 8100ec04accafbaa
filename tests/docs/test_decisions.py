"""Decision records are numbered without gaps, have the same headings, and are all in the index."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"
RECORDS = sorted(FOLDER.glob("0*.md"))
HEADINGS = ("## Context", "## Decision", "## Consequences")


def test_records_are_numbered_without_gaps_and_listed() -> None:
    assert [int(record.name[:4]) for record in RECORDS] == list(range(1, len(RECORDS) + 1))
    listed = re.findall(r"^\| \[(\d{4})\]\((\S+)\) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert listed == [(record.name[:4], record.name) for record in RECORDS]


def test_records_have_the_same_headings_in_order() -> None:
    for record in RECORDS:
        lines = record.read_text().splitlines()
        assert lines[0].startswith(f"# {record.name[:4]}: "), record.name
        assert lines[2].startswith("Status: "), record.name
        found = [line for line in lines if line in HEADINGS]
        assert found == list(HEADINGS), record.name
