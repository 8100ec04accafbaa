"""Finds where a JSON value ends, character by character, and writes JSON that any socket takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from .pieces import Piece
from .reader import Reader, Steps

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]<]')
_SCALAR = re.compile(r"[^,\]}<\s]*")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


class JsonScanner:
    """Finds the end of a string or of an object, from behind its first character.

    It knows strings, escapes and brackets, no more: all else may be what the model likes. Outside of strings no JSON
    has a "<"; there it stops, as a mark may follow and the model may have left brackets open.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "done", "stopped")

    def __init__(self, first: str) -> None:
        self._in_string = first == '"'
        self._depth = 0 if self._in_string else 1
        self._escaped = False
        self.done = False
        """The value is complete."""
        self.stopped = False
        """The next character is "<"."""

    def scan(self, text: str, start: int) -> int:
        at = start
        while at < len(text) and not self.done and not self.stopped:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            character = found[0]
            if character == '"':
                self._in_string = not self._in_string
                self.done = not self._in_string and self._depth == 0
            elif character == "\\":
                self._escaped = True
            elif character == "<":
                self.stopped = True
                at -= 1
            else:
                self._depth += 1 if character in "{[" else -1
                self.done = self._depth == 0
        return at


def read_value(
    reader: Reader, first: str, ends: tuple[str, ...] = (), give: Callable[[str], Piece] | None = None
) -> Steps[tuple[str, bool]]:
    """Read a string or an object on from its first character, which has been read.

    Stops, too, before one of ``ends`` outside of strings, and at the end of the answer. give: give the text out, as
    pieces of this kind. Returns (the text, or "" if it was given out; whether the value is complete).
    """
    scanner = JsonScanner(first)
    parts: list[str] = []
    chunk = first
    while True:
        if give is None:
            parts.append(chunk)
        elif chunk:
            yield give(chunk)
        if scanner.done:
            return "".join(parts), True
        if scanner.stopped:
            if ends and (yield from reader.sees(*ends)):
                return "".join(parts), False
            scanner.stopped = False
            chunk = reader.take_text(1)
            continue
        if not reader.unread:
            if reader.at_end:
                return "".join(parts), False
            yield None
        chunk = reader.scan(scanner)


def skip_value(reader: Reader) -> Steps[None]:
    """Read any value, for nothing."""
    first = yield from reader.one_of("{", "[", '"')
    if first:
        yield from read_value(reader, first)
    else:
        yield from reader.run(_SCALAR)


def loads(text: str) -> Any:
    """The value of a JSON text in which strings may hold line breaks. Raises ValueError for all that is not JSON, and
    for NaN and the infinities."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None


def dumps(value: Any) -> str:
    """JSON text; half characters (lone surrogates) are written as escapes, as no UTF-8 text can hold them."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_sendable(text) else json.dumps(value)


def is_sendable(text: str) -> bool:
    """False if the text holds half a character."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")
