"""Reads a log from its first item to its last: detects the format, and counts and skips broken items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .formats import FORMATS, Reader, detect, make_reader
from .log_file import LogFile
from .logged_request import BadItem, LogError, LoggedRequest
from .prompt_text import PromptText

SHOWN = 5
"""Number of broken items that the report shows."""

UNKNOWN = f"its format is none of {', '.join(FORMATS)} (see docs/analyze.md); name the log's format with --format"


@dataclass(slots=True)
class LogStory:
    """The outcome of reading a log. bad: number of items that were skipped, as they are not requests; first_bad:
    (number, reason) of the first ones."""

    name: str
    format: str = ""
    items: int = 0
    bad: int = 0
    first_bad: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading a log. format: None to detect it. page_size, block_tokens: None for the format's own."""

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
            self._make_reader(options.format)

    def requests(self, progress: Callable[[int], object]) -> Iterator[LoggedRequest]:
        """progress: called with the bytes read so far after each item. Raises LogError."""
        most = self._options.max_requests
        count = 0
        for number, item in self._file.items(self._options.max_line_bytes):
            self.story.items += 1
            try:
                for request in self._read_item(item):
                    yield request
                    count += 1
                    if count == most:
                        self.story.notes.append(f"only the first {most:,} requests were read (--max-requests)")
                        return
            except BadItem as error:
                self._skip_item(number, str(error))
            progress(self._file.bytes_read)

    def _read_item(self, item: Any) -> Iterator[LoggedRequest]:
        if isinstance(item, BadItem):
            raise item
        if self.reader is None:
            found = detect(item)
            if found is None:
                raise BadItem(UNKNOWN)
            self._make_reader(found)
        assert self.reader is not None
        return self.reader.read_item(item)

    def _make_reader(self, name: str) -> None:
        options = self._options
        self.reader = make_reader(name, self._text, options.page_size, options.block_tokens)
        self.story.format = name
        self.story.notes += self.reader.notes

    def _skip_item(self, number: int, reason: str) -> None:
        self.story.bad += 1
        if len(self.story.first_bad) < SHOWN:
            self.story.first_bad.append((number, reason[:200]))


def refuse_empty(reader: LogReader) -> LogError:
    """The error for a log without requests."""
    story = reader.story
    if not story.items:
        return LogError(f"{story.name} is empty")
    if not story.bad:
        return LogError(f"{story.name} has no requests yet")
    number, reason = story.first_bad[0]
    return LogError(f"{story.name} has no readable request among {story.items:,} items; item {number}: {reason}")
