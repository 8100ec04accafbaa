"""A text that arrives in pieces, read as if it were whole.

Parsers are generators: what they read with waits, by yielding None, until enough has come to decide, and no longer.
So a parser reads like one for a whole text, and how the text was cut cannot change what it finds:

    if (yield from reader.one_of("<tool_call>")):      waits after "<tool", but not after "<tonic"
        name = yield from reader.run(NAME)

The reader holds no more than the last unread push and the beginning of a mark. What is read is gone; a parser that may
have to give it back asks for it to be kept. `StreamParser` is the base of the parsers that read this way.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Protocol, TypeVar

from .pieces import CallArguments, CallBegins, Piece, Text, ToolSpec, joined

T = TypeVar("T")
Steps = Generator[Piece | None, None, T]
"""A part of a parser: yields pieces as they become certain, and None when it needs more text."""

SPACE = re.compile(r"\s*")


class Scanner(Protocol):
    def scan(self, text: str, start: int) -> int:
        """The end of what belongs to the scanned value, in ``text`` from ``start`` on."""
        ...


class Reader:
    __slots__ = ("_at", "_ended", "_kept", "_text")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    @property
    def unread(self) -> int:
        """Characters that have come and wait to be read."""
        return len(self._text) - self._at

    @property
    def held(self) -> int:
        """Characters in memory: those that wait, and those that were read since the last ones came."""
        return len(self._text)

    @property
    def at_end(self) -> bool:
        """True if all has been read and no more will come."""
        return self._ended and self._at == len(self._text)

    def keep(self, text: str = "") -> None:
        """From now on keep what is read, as if it began with ``text``."""
        self._kept = [text]

    def kept(self) -> str:
        """All that was read since `keep`; ends the keeping."""
        kept = "".join(self._kept or ())
        self._kept = None
        return kept

    def take_text(self, count: int) -> str:
        """Read so many characters, or what is there of them."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        if self._kept is not None:
            self._kept.append(text)
        return text

    def scan(self, scanner: Scanner) -> str:
        """Read what has come of the value that ``scanner`` looks at."""
        return self.take_text(scanner.scan(self._text, self._at) - self._at)

    def split(self, markers: tuple[str, ...]) -> tuple[str, str]:
        """Read up to the first of these marks and the mark, or, if none has come, all that cannot begin one.

        Returns (text, mark or ""). No mark may be the beginning of another, or stand inside it except at its end.
        """
        whole, beginnings, longest = _patterns(markers)
        found = whole.search(self._text, self._at)
        if found is not None:
            return self.take_text(found.start() - self._at), self.take_text(len(found[0]))
        end = len(self._text)
        if not self._ended:
            begun = beginnings.search(self._text, max(self._at, end - longest + 1))
            end = end if begun is None else begun.start()
        return self.take_text(end - self._at), ""

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read as many characters as ``pattern``, one class with a star, matches."""
        parts: list[str] = []
        while True:
            found = pattern.match(self._text, self._at)
            parts.append(self.take_text(found.end() - self._at if found else 0))
            if self._at < len(self._text) or self._ended:
                return "".join(parts)
            yield None

    def space(self) -> Steps[str]:
        """Read whitespace, if there is any."""
        return (yield from self.run(SPACE))

    def sees(self, *markers: str) -> Steps[str]:
        """The first of these marks with which the rest of the text begins, without reading it; "" for none."""
        while True:
            for marker in markers:
                ahead = self._text[self._at : self._at + len(marker)]
                if ahead == marker:
                    return marker
                if marker.startswith(ahead) and not self._ended:
                    break  # It may yet be this one.
            else:
                return ""
            yield None

    def one_of(self, *markers: str) -> Steps[str]:
        """Read the first of these marks with which the rest of the text begins; "" for none. If one mark is the
        beginning of another, list the longer one first."""
        found = yield from self.sees(*markers)
        self.take_text(len(found))
        return found


@functools.lru_cache(maxsize=256)
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Patterns that find a whole mark, and the beginning of one at the end of a text; and the longest mark's length."""
    whole = "|".join(map(re.escape, markers))
    beginnings = "|".join(_beginnings(marker) for marker in markers if len(marker) > 1)
    return re.compile(whole), re.compile(rf"(?:{beginnings or '(?!)'})\Z"), max(map(len, markers))


def _beginnings(marker: str) -> str:
    """Matches each proper beginning of a mark: "<th" becomes "<(?:t)?"."""
    pattern = ""
    for character in reversed(marker[:-1]):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern


class StreamParser(ABC):
    """Runs ``_parse``, which is written as if the answer were there as a whole; see `Reader`."""

    def __init__(self, tools: Sequence[ToolSpec] = ()) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.reader = Reader()
        self.call = -1
        """The index of the call that began last."""
        self._steps = self._parse()

    def push_text(self, text: str) -> list[Piece]:
        self.reader.feed(text)
        return self._go_on()

    def finish(self) -> list[Piece]:
        self.reader.end()
        return self._go_on()

    def begin_call(self, name: str) -> CallBegins:
        """The next call begins; what was kept of it need not be given back."""
        self.reader.kept()
        self.call += 1
        return CallBegins(self.call, name)

    def arguments(self, delta: str) -> CallArguments:
        """More arguments of that call."""
        return CallArguments(self.call, delta)

    def words(self, *markers: str) -> Steps[str]:
        """Give out text up to one of these marks; return the mark, or "" at the end of the answer."""
        while True:
            text, marker = self.reader.split(markers)
            if text:
                yield Text(text)
            if marker or self.reader.at_end:
                return marker
            yield None

    def gap(self, *markers: str) -> Steps[str]:
        """After a call: pass over whitespace if one of these marks, which is returned, or the end follows."""
        space = yield from self.reader.space()
        marker = yield from self.reader.one_of(*markers)
        if space and not marker and not self.reader.at_end:
            yield Text(space)
        return marker

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Read the whole answer."""

    def _go_on(self) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self._steps:
            if piece is None:
                break
            pieces.append(piece)
        return joined(pieces)
