"""The base of all parsers of an answer: takes text, and continues where it waited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .pieces import CallArguments, CallBegins, Piece, Text, ToolSpec, joined
from .reader import Reader, Steps


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
