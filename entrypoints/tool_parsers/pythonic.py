"""Calls as a list of Python calls: Llama 4, Llama 3.2 and others that were taught so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from .json_text import dumps
from .pieces import ArgumentsForm, Text, ToolSpec
from .python_literals import literal_to_json
from .reader import Steps, StreamParser

_START, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.]*")
_KEYWORD = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)\s*")
_BLANK = re.compile(r"[ \t]*")


class PythonicParser(StreamParser):
    """
    [read_file(path="a.txt", lines=[1, 2]), list_files()]

    A list at the beginning of a line, if its first element calls a tool; behind <|python_start|>, any function.
    Arguments go out one by one, when each is complete: literals as JSON, all else as a string of its source. Arguments
    without a keyword are those of the tool's schema in order.
    """

    keeps_special_tokens: ClassVar[bool] = True

    def __init__(self, tools: Sequence[ToolSpec] = ()) -> None:
        super().__init__(tools)
        self._call_starts = tuple(f"{name}(" for name in self.tools)

    call_start: ClassVar[str] = "["
    name_end: ClassVar[str] = "("
    call_end: ClassVar[str] = ")"
    next_call: ClassVar[str | None] = ", "
    calls_end: ClassVar[str] = "]"
    arguments_form: ClassVar[ArgumentsForm] = "python"
    marks_calls: ClassVar[bool] = False

    def _parse(self) -> Steps[None]:
        self.reader.keep()
        yield from self.reader.space()
        found = yield from self.reader.one_of("[", _START)
        if not found:
            space = self.reader.kept()
            yield Text(space)
            found = yield from self._words_before_list(True)
        while found:
            found = yield from self._read_list(found)
            found = found or (yield from self._words_before_list(False))

    def _words_before_list(self, begins_line: bool) -> Steps[str]:
        """Give out words up to a list, or its mark, which is returned and kept; "" at the end of the answer."""
        reader = self.reader
        while True:
            text, found = reader.split(("[", _START))
            if text:
                yield Text(text)
                last_line = text.rpartition("\n")[2]
                begins_line = bool(_BLANK.fullmatch(last_line)) and (begins_line or last_line != text)
            if found == "[" and not begins_line:
                yield Text(found)
            elif found or reader.at_end:
                reader.keep(found)
                return found
            else:
                yield None

    def _read_list(self, found: str) -> Steps[str]:
        """Calls from "[" or the mark before it on, which was kept. Returns such a start that comes next without words
        between, or ""."""
        reader = self.reader
        is_marked = found == _START
        if is_marked:
            yield from reader.space()
            found = yield from reader.one_of("[")
        yield from reader.space()
        while found:
            name = yield from self._read_name(is_marked)
            if name is None:
                break
            is_marked = True
            yield self.begin_call(name)
            yield from self._read_arguments(self.tools.get(name, ToolSpec(name)))
            reader.keep()
            yield from reader.space()
            found = yield from reader.one_of(",", "]")
            if found == "]":
                reader.kept()
                found = yield from self.gap("[", _START, _END)
                if found == _END:
                    found = yield from self.gap("[", _START)
                if found:
                    reader.keep(found)
                return found
            yield from reader.space()
        kept = reader.kept()
        if kept.strip() or not reader.at_end:
            yield Text(kept)
        return ""

    def _read_name(self, any_name: bool) -> Steps[str | None]:
        if not any_name:
            start = yield from self.reader.one_of(*self._call_starts)
            return start[:-1] or None
        name = yield from self.reader.run(_NAME)
        return name if name and (yield from self.reader.one_of("(")) else None

    def _read_arguments(self, tool: ToolSpec) -> Steps[None]:
        """Give out the arguments as parts of an object, up to the ")", which is read."""
        reader = self.reader
        parameters = list(tool.properties)
        count = 0
        while True:
            source, is_complete = yield from self._read_source()
            before = ", " if count else "{"
            keyword = _KEYWORD.match(source)
            name = keyword[1] if keyword else parameters[count] if count < len(parameters) else f"argument{count}"
            value = source[keyword.end() if keyword else 0 :].strip()
            if not is_complete:
                if value or keyword:
                    yield self.arguments(f"{before}{dumps(name)}: {_beginning(value)}")
                return
            if value or keyword:
                yield self.arguments(f"{before}{dumps(name)}: {literal_to_json(value) or dumps(value)}")
                count += 1
            if not (yield from reader.one_of(",")):
                yield self.arguments("}" if count else "{}")
                yield from reader.one_of(")")
                return

    def _read_source(self) -> Steps[tuple[str, bool]]:
        """The source of one argument, and whether it is complete."""
        scanner = _ArgumentScanner()
        parts: list[str] = []
        while True:
            parts.append(self.reader.scan(scanner))
            if scanner.done or self.reader.at_end:
                return "".join(parts), scanner.done
            yield None


class _ArgumentScanner:
    """Finds the end of an argument: a comma or a closing bracket outside of strings and inner brackets."""

    __slots__ = ("_closing", "_depth", "_escaped", "_opening", "_quote", "_triple", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._triple = False
        self._escaped = False
        self._opening = 0
        """Quotes that a string began with so far, until it is known whether there are three."""
        self._closing = 0
        """Quotes in a row inside a string."""
        self.done = False

    def scan(self, text: str, start: int) -> int:
        for at in range(start, len(text)):
            character = text[at]
            if self._quote and self._stays_inside(character):
                continue
            if character in "'\"":
                self._quote, self._opening, self._closing, self._triple = character, 1, 0, False
            elif character in "([{":
                self._depth += 1
            elif self._depth == 0 and character in ",)]}":
                self.done = True
                return at
            elif character in ")]}":
                self._depth -= 1
        return len(text)

    def _stays_inside(self, character: str) -> bool:
        """Take the next character after a quote. False if the string was over before it."""
        if self._opening:
            if character == self._quote:
                self._opening += 1
                if self._opening == 3:
                    self._opening, self._triple = 0, True
                return True
            was_empty = self._opening == 2
            self._opening = 0
            if was_empty:
                self._quote = ""
                return False
        self._closing = self._closing + 1 if character == self._quote and not self._escaped else 0
        self._escaped = character == "\\" and not self._escaped
        if self._closing == (3 if self._triple else 1):
            self._quote = ""
        return True


def _beginning(value: str) -> str:
    """The beginning of a value's JSON text; without the closing quote for a string that does not end."""
    quote = value[:3] if value[:3] in ("'''", '"""') else value[:1]
    if quote[:1] not in ("'", '"'):
        return value
    text = literal_to_json(value + quote)
    return (text or dumps(value[len(quote) :]))[:-1]
