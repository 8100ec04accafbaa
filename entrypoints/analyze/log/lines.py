"""The items of a log, one after the other: lines of JSON, or the elements of one JSON array. No log is ever loaded as a
whole; what is too long is passed over without being kept."""

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

from .request import BadItem, LogError

_CHUNK = 1 << 20
_IN_NUMBERS = ("", ".", "e", "E", "+", "-")
"""What follows a number that may go on with the next piece of text."""

_GZIP = b"\x1f\x8b"

Item = tuple[int, Any]
"""The number of the line, or of the element, from 1; and what it holds, or a BadItem."""


class LogFile:
    """An open log. Closes the file when left, unless it is the standard input. Raises LogError."""

    def __init__(self, path: str) -> None:
        """path: - for the standard input. Gzip is known by its first bytes."""
        self.name = path if path != "-" else "standard input"
        try:
            self._raw: BinaryIO = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
            self.size = None if path == "-" or not Path(path).is_file() else Path(path).stat().st_size
            """In bytes; None where nobody knows."""
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
        """Of the file, as it is on disk."""
        return self._counted.count

    def items(self, max_bytes: int) -> Iterator[Item]:
        """max_bytes: of one item; a longer one is a BadItem. Raises LogError where the file cannot be read on."""
        try:
            start = self._stream.peek(64).lstrip(codecs.BOM_UTF8).lstrip()[:1]
            yield from _elements(self._stream, max_bytes) if start == b"[" else _lines(self._stream, max_bytes)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or error
            raise LogError(f"{self.name} cannot be read on after {self.bytes_read} bytes: {reason}") from None


class _Counted(io.RawIOBase):
    """A raw file that counts what is read of it."""

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
            yield number, decoded(msgspec.json.decode, line)


def decoded(decode: Callable[[Any], Any], data: Any) -> Any:
    """What a decoder makes of some JSON, or a BadItem."""
    try:
        return decode(data)
    except RecursionError:
        return BadItem("nested too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BadItem(f"no valid JSON: {error}")


def _elements(stream: io.BufferedReader[Any], max_bytes: int) -> Iterator[Item]:
    """The elements of an array. A broken one ends it: nobody knows where the next would begin."""
    reader = _ArrayReader(stream, max_bytes)
    number = 0
    try:
        for element in reader.elements():
            number += 1
            yield number, element
    except BadItem as error:
        yield number + 1, BadItem(f"the array cannot be read on from here: {error}")


class _ArrayReader:
    """Keeps as much of the text as one element takes. Bytes that are no UTF-8 become surrogates, which spoil only the
    element that they are in."""

    def __init__(self, stream: io.BufferedReader[Any], max_bytes: int) -> None:
        self._stream = stream
        self._max = max_bytes
        self._decode_text = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._parse = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = 0
        self._ended = False

    def elements(self) -> Iterator[Any]:
        """Raises BadItem for what is no array."""
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
        """The next one, from as much text as it takes: where that ends too early there is more to be read."""
        while True:
            try:
                value, end = self._parse(self._text, self._at)
            except ValueError as error:
                if self._ended:
                    raise BadItem(f"no valid JSON, or the file ends in it: {error}") from None
                if len(self._text) - self._at > self._max:
                    reason = f"no valid JSON, or an element longer than {self._max >> 20} MiB (--max-line-mb)"
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
        """The first one from here on that is no white space; empty at the end of the file."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            if self._ended:
                return ""
            self._read_more()

    def _read_more(self) -> None:
        """At least as much again as there is of the element, so that it is not tried too often."""
        data = self._stream.read(max(_CHUNK, len(self._text) - self._at))
        self._ended = not data
        self._text = self._text[self._at :] + self._decode_text(data, self._ended)
        self._at = 0
