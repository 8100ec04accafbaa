"""The items of a log in order: lines of JSON, or the elements of one JSON array. Only one item is in memory at a time;
items that are too long are skipped."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from .logged_request import BadItem, LogError

_CHUNK = 1 << 20
_IN_NUMBERS = ("", ".", "e", "E", "+", "-")
"""Characters after a number that may continue in the next piece of text."""

_GZIP = b"\x1f\x8b"

Item = tuple[int, Any]
"""(number of the line or element from 1, its value or a BadItem)."""


class LogFile:
    """An open log; a context manager that closes the file, unless it is the standard input. Raises LogError."""

    def __init__(self, path: str) -> None:
        """path: - for the standard input. Gzip is recognised by its first bytes."""
        self.name = path if path != "-" else "standard input"
        try:
            self._raw: BinaryIO = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
            self.size = None if path == "-" or not Path(path).is_file() else Path(path).stat().st_size
            """In bytes; None where the size is unknown."""
            counted = _Counted(self._raw)
            self._counted = counted
            stream: io.BufferedReader[Any] = io.BufferedReader(counted, _CHUNK)
            if stream.peek(2)[:2] == _GZIP:
                stream = io.BufferedReader(gzip.GzipFile(fileobj=stream), _CHUNK)
            self._stream = stream
        except OSError as error:
            raise LogError(f"{path} cannot be read: {error.strerror or error}") from None

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._raw is not sys.stdin.buffer:
            self._raw.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read of the file, as stored on disk."""
        return self._counted.count

    def items(self, max_bytes: int) -> Iterator[Item]:
        """max_bytes: limit of one item; a longer one gives a BadItem. Raises LogError where reading fails."""
        try:
            start = self._stream.peek(64).lstrip(codecs.BOM_UTF8).lstrip()[:1]
            yield from _elements(self._stream, max_bytes) if start == b"[" else _lines(self._stream, max_bytes)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise LogError(f"{self.name} cannot be read beyond byte {self.bytes_read}: {reason}") from None


class _Counted(io.RawIOBase):
    """A raw file that counts the bytes read."""

    def __init__(self, file: BinaryIO) -> None:
        self._read = getattr(file, "read1", file.read)
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)


def _lines(stream: io.BufferedReader[Any], max_bytes: int) -> Iterator[Item]:
    number = 0
    while line := stream.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes and not line.endswith(b"\n"):
            length = len(line)
            while (rest := stream.readline(_CHUNK)) and not rest.endswith(b"\n"):
                length += len(rest)
            yield number, BadItem(f"longer than {max_bytes >> 20} MiB ({length + len(rest)} bytes); see --max-line-mb")
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.isspace():
            yield number, decode_item(msgspec.json.decode, line)


def decode_item(decode: Callable[[Any], Any], data: Any) -> Any:
    """The decoded JSON, or a BadItem."""
    try:
        return decode(data)
    except RecursionError:
        return BadItem("nested too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BadItem(f"invalid JSON: {error}")


def _elements(stream: io.BufferedReader[Any], max_bytes: int) -> Iterator[Item]:
    """The elements of an array, up to a broken one: the start of the next cannot be found."""
    reader = _ArrayReader(stream, max_bytes)
    number = 0
    try:
        for element in reader.elements():
            number += 1
            yield number, element
    except BadItem as error:
        yield number + 1, BadItem(f"the array cannot be read beyond this element: {error}")


class _ArrayReader:
    """Keeps only the text of one element. Bytes that are not UTF-8 become surrogates, which spoil only their
    element."""

    def __init__(self, stream: io.BufferedReader[Any], max_bytes: int) -> None:
        self._stream = stream
        self._max = max_bytes
        self._decode_text = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._parse = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = 0
        self._ended = False

    def elements(self) -> Iterator[Any]:
        """Raises BadItem for a broken array."""
        self._next_character()
        self._at += 1  # the bracket
        if self._next_character() == "]":
            return
        while True:
            yield self._element()
            separator = self._next_character()
            self._at += 1
            if separator == "]":
                return
            if separator != ",":
                raise BadItem(f"{separator!r} where a comma should be" if separator else "the file ends in the array")
            self._next_character()

    def _element(self) -> Any:
        """The next element; reads more text while the element is incomplete."""
        while True:
            try:
                value, end = self._parse(self._text, self._at)
            except ValueError as error:
                if self._ended:
                    raise BadItem(f"invalid or incomplete JSON: {error}") from None
                if len(self._text) - self._at > self._max:
                    reason = f"invalid JSON, or an element longer than {self._max >> 20} MiB (--max-line-mb)"
                    raise BadItem(f"{reason}: {error}") from None
                self._read_more()
                continue
            except RecursionError:
                raise BadItem("nested too deeply") from None
            if isinstance(value, int | float) and not self._ended and self._text[end : end + 1] in _IN_NUMBERS:
                self._read_more()
                continue
            self._at = end
            return value

    def _next_character(self) -> str:
        """The next character that is not white space; "" at the end of the file."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            if self._ended:
                return ""
            self._read_more()

    def _read_more(self) -> None:
        """Read at least as much again as there is of the element, so that parsing is not retried too often."""
        data = self._stream.read(max(_CHUNK, len(self._text) - self._at))
        self._ended = not data
        self._text = self._text[self._at :] + self._decode_text(data, self._ended)
        self._at = 0
