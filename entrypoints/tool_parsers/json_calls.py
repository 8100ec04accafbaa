"""Reads a call that is written as one JSON object, as it is written: ``{"name": "f", "arguments": {"a": 1}}``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from .json_text import dumps, is_sendable, loads, read_value, skip_value
from .reader import Steps, StreamParser

_ARGUMENTS = ("arguments", "parameters")
_LONGEST_ESCAPE = len(r"\ud83d\ude00")
_MAY_COME_FIRST = ("name", "type", "id", *_ARGUMENTS)


def read_call(
    parser: StreamParser, ends: tuple[str, ...] = (), accepts: Callable[[str], bool] | None = None
) -> Steps[bool]:
    """Read a call from behind its "{". Returns whether it was one; if not, no piece was given out.

    ends: marks that end the call though brackets are still open. accepts: whether a function of this name may be
    meant, where the object may as well be none.
    """
    return (yield from _Call(parser, ends, accepts).read_object())


class _Call:
    """One object. The name and the arguments may come in any order; other keys (an id, a type) are passed over.

    The call begins as soon as it can be nothing else: when both its name and the "{" of its arguments are there. The
    arguments then go out as the model writes them. A model that writes them as a string of JSON text, or leaves them
    out, is understood too, and so is one that forgets the last "}".
    """

    def __init__(self, parser: StreamParser, ends: tuple[str, ...], accepts: Callable[[str], bool] | None) -> None:
        self._parser, self._reader = parser, parser.reader
        self._ends, self._accepts = ends, accepts
        self._name: str | None = None
        self._arguments: str | None = None
        """Arguments that came before the name, or not as plain text."""
        self._begun = False

    def read_object(self) -> Steps[bool]:
        reader = self._reader
        closed = False
        while True:
            yield from reader.space()
            opened = yield from reader.one_of('"', "}")
            closed = opened == "}"
            if opened != '"' or not (yield from self._read_pair()):
                break
            yield from reader.space()
            if not (yield from reader.one_of(",")):
                closed = bool((yield from reader.one_of("}")))
                break
        if self._begun:
            return True
        if self._name is None or not (closed or reader.at_end):
            return False
        yield self._parser.begin_call(self._name)
        if closed:
            yield self._parser.arguments(self._arguments or "{}")
        elif self._arguments:
            yield self._parser.arguments(self._arguments)
        return True

    def _read_pair(self) -> Steps[bool]:
        """Read a key, from behind its first quote, and its value. False if that is no part of a call."""
        reader = self._reader
        key = yield from self._read_string()
        if key is None or (self._accepts and not self._begun and key not in _MAY_COME_FIRST):
            return False
        yield from reader.space()
        if not (yield from reader.one_of(":")):
            return False
        yield from reader.space()
        if key == "name" and self._name is None:
            return (yield from self._read_name())
        if key in _ARGUMENTS and self._arguments is None and not self._begun:
            return (yield from self._read_arguments())
        yield from skip_value(reader)
        return True

    def _read_name(self) -> Steps[bool]:
        if not (yield from self._reader.one_of('"')):
            return False
        name = yield from self._read_string()
        if not name or not name.isprintable() or (self._accepts and not self._accepts(name)):
            return False
        self._name = name
        if self._arguments is not None:
            yield self._parser.begin_call(name)
            yield self._parser.arguments(self._arguments)
            self._begun = True
        return True

    def _read_arguments(self) -> Steps[bool]:
        first = yield from self._reader.one_of("{", '"', "null")
        if first == "{":
            return (yield from self._read_object())
        if first == '"':
            return (yield from self._read_quoted())
        if first == "null":
            self._arguments = "{}"
        return bool(first)

    def _read_object(self) -> Steps[bool]:
        if self._name is None:
            self._arguments, complete = yield from read_value(self._reader, "{")
            return complete
        yield self._parser.begin_call(self._name)
        self._begun = True
        yield from read_value(self._reader, "{", self._ends, self._parser.arguments)
        return True

    def _read_quoted(self) -> Steps[bool]:
        """Arguments as a string of JSON text, which must hold an object, or its beginning if the answer ends here."""
        raw, complete = yield from read_value(self._reader, '"')
        if not complete:
            self._arguments = _unquote_beginning(raw)
            return False
        try:
            text = loads(raw)
            value = loads(text) if text.strip() else {}
        except ValueError:
            return False
        if isinstance(value, dict):
            self._arguments = text if text.strip() and is_sendable(text) else dumps(value)
        return isinstance(value, dict)

    def _read_string(self) -> Steps[str | None]:
        """Read a string from behind its first quote; None if it does not end, or is none."""
        raw, complete = yield from read_value(self._reader, '"')
        try:
            return loads(raw) if complete else None
        except ValueError:
            return None


def _unquote_beginning(raw: str) -> str:
    """The text of the beginning of a JSON string; an escape that is cut off is left out."""
    for end in range(len(raw), max(0, len(raw) - _LONGEST_ESCAPE), -1):
        with contextlib.suppress(ValueError):
            text = loads(raw[:end] + '"')
            if is_sendable(text):
                return text
    return ""
