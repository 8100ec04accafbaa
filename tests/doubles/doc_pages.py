"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))
PAGES_OF_EXAMPLES = sorted((ROOT / "examples").rglob("*.md"))

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!--\s*not run\b:?\s*(?P<reason>.*?)\s*-->")


@dataclass(frozen=True)
class Fence:
    """A block of code, or of anything else between two lines of backticks."""

    language: str
    """What stands behind the backticks; "" for drawings."""
    text: str
    line: int
    """Line of the opening backticks, from 1."""
    not_run: str | None = None
    """The reason in the comment `<!-- not run: REASON -->` on the line above; "" where it gives none."""
    follows: str = ""
    """The text between this block and the one before it, stripped."""


def read_fences(page: str) -> list[Fence]:
    found: list[Fence] = []
    end = 0
    for match in _FENCE.finditer(page):
        above = page[end : match.start()]
        last_line = above.rstrip("\n").rpartition("\n")[2]
        mark = _MARK.fullmatch(last_line.strip()) if above.endswith("\n") and not above.endswith("\n\n") else None
        found.append(
            Fence(
                language=match["language"],
                text=match["text"],
                line=page.count("\n", 0, match.start()) + 1,
                not_run=mark["reason"] if mark is not None else None,
                follows=above.strip(),
            )
        )
        end = match.end()
    return found


def prose(page: str) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page)


def count_marks(page: str) -> int:
    return len(_MARK.findall(prose(page)))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))
