"""docs/glossary.md names files that exist, and in which its words are used."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = (
    "lease", "claim", "handoff", "parked", "fork", "match", "fallback", "row", "slot", "page", "trunk", "committed",
    "quarantine", "retract", "reserve", "namespace", "constraint", "item trie", "leaf", "victim", "step", "turn",
    "chunk",
)  # fmt: skip
"""Words that nobody should have to guess."""


def entries() -> list[tuple[str, str, str]]:
    """(word, meaning, file)"""
    page = (ROOT / "docs" / "glossary.md").read_text()
    return re.findall(r"^\| ([a-z ]+) \| (.+) \| `(\S+)` \|$", page, re.MULTILINE)


def test_every_glossary_line_is_parsed_as_an_entry() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    assert len(entries()) == page.count("\n| ") - 1


def test_glossary_words_are_sorted_and_unique() -> None:
    words = [word for word, _, _ in entries()]
    assert words == sorted(set(words))
    assert set(WORDS) <= set(words)


def test_glossary_words_occur_in_their_files() -> None:
    for word, _, file in entries():
        text = (ROOT / file).read_text().lower().replace("_", " ")
        stem = word[: max(3, len(word) - 2)]  # also its plural, and what one does
        assert re.search(rf"\b{stem}", text), (word, file)
