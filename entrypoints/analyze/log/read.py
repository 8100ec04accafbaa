"""Reads a log from its first item to its last: finds out the format, counts what is broken, and goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .formats import FORMATS, Reader, detect, make_reader
from .lines import LogFile
from .prompt_text import PromptText
from .request import BadItem, LogError, LoggedRequest

SHOWN = 5
"""Broken items that the report names."""

UNKNOWN = (
    "no format is known that has this: " + ", ".join(FORMATS) + " are (see docs/analyze.md); --format says which it is"
)


@dataclass(slots=True)
class LogStory:
    """What came of reading a log. bad: items that are no requests, and were passed over; first_bad: the numbers and
    reasons of the first ones."""

    name: str
    format: str = ""
    items: int = 0
    bad: int = 0
    first_bad: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a log is read. format: None to find out. page_size, block_tokens: None for the format's own."""

    format: str | None = None
    page_size: int | None = None
    block_tokens: int | None = None
    max_line_bytes: int = 32 << 20
    max_requests: int | None = None


class LogReader:
    """The requests of one log."""

    def __init__(self, file: LogFile, text: PromptText, options: ReadOptions) -> None:
        self.story = LogStory(file.name, options.format or "")
        self.reader: Reader | None = None
        """None until the format is known."""
        self._file = file
        self._text = text
        self._options = options
        if options.format is not None:
            self._make(options.format)

    def requests(self, progress: Callable[[int], object]) -> Iterator[LoggedRequest]:
        """progress: told how many bytes have been read, after each item. Raises LogError."""
        most = self._options.max_requests
        count = 0
        for number, item in self._file.items(self._options.max_line_bytes):
            self.story.items += 1
            try:
                for request in self._read(item):
                    yield request
                    count += 1
                    if count == most:
                        self.story.notes.append(f"only the first {most:,} requests were read (--max-requests)")
                        return
            except BadItem as error:
                self._pass_over(number, str(error))
            progress(self._file.bytes_read)

    def _read(self, item: Any) -> Iterator[LoggedRequest]:
        if isinstance(item, BadItem):
            raise item
        if self.reader is None:
            found = detect(item)
            if found is None:
                raise BadItem(UNKNOWN)
            self._make(found)
        assert self.reader is not None
        return self.reader.read(item)

    def _make(self, name: str) -> None:
        options = self._options
        self.reader = make_reader(name, self._text, options.page_size, options.block_tokens)
        self.story.format = name
        self.story.notes += self.reader.notes

    def _pass_over(self, number: int, reason: str) -> None:
        self.story.bad += 1
        if len(self.story.first_bad) < SHOWN:
            self.story.first_bad.append((number, reason[:200]))


def refuse_empty(reader: LogReader) -> LogError:
    """Why there is nothing to analyse."""
    story = reader.story
    if not story.items:
        return LogError(f"{story.name} is empty")
    if not story.bad:
        return LogError(f"{story.name} has no requests in it yet")
    number, reason = story.first_bad[0]
    return LogError(
        f"{story.name} has no request that can be read; of {story.items:,} items, number {number}: {reason}"
    )
