"""Calls between DeepSeek's own marks: V3 and R1, and, without a code block, V3.1 and later."""

from __future__ import annotations

import re
from typing import ClassVar

from .json_text import read_value
from .pieces import ArgumentsForm, Text
from .reader import Steps, StreamParser

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_KIND = "function"
_ENDS = (_CALL_END, _CALL, _CALLS_END)
_WORD = re.compile(r"[^<`{\n]*")


class DeepSeekV3Parser(StreamParser):
    """
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read_file
    ```json
    {"path": "a.txt"}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>list_files
    ```json
    {}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    The form of V3.1 is read, too: see `DeepSeekV31Parser`. The outermost marks may be missing.
    """

    keeps_special_tokens: ClassVar[bool] = True

    call_start: ClassVar[str] = f"{_CALLS}{_CALL}{_KIND}{_SEPARATOR}"
    name_end: ClassVar[str] = "\n```json\n"
    call_end: ClassVar[str] = f"\n```{_CALL_END}"
    next_call: ClassVar[str | None] = f"\n{_CALL}{_KIND}{_SEPARATOR}"
    calls_end: ClassVar[str] = _CALLS_END
    arguments_form: ClassVar[ArgumentsForm] = "json"
    marks_calls: ClassVar[bool] = True

    def _parse(self) -> Steps[None]:
        while mark := (yield from self.words(_CALLS, _CALL)):
            while mark in (_CALLS, _CALL):
                mark = yield from self._read_call(mark)

    def _read_call(self, mark: str) -> Steps[str]:
        """A call from its mark on. Returns the mark that comes next without words between, or ""."""
        reader = self.reader
        reader.keep(mark)
        if mark == _CALLS:
            yield from reader.space()
            mark = yield from reader.one_of(_CALL)
        name = (yield from self._read_name()) if mark else None
        if name is None or not (yield from self._read_arguments(name)):
            yield Text(reader.kept())
            return ""
        mark = yield from self.gap(_CALL, _CALLS_END)
        return (yield from self.gap(_CALLS, _CALL)) if mark == _CALLS_END else mark

    def _read_name(self) -> Steps[str | None]:
        """The name; None if it is not complete."""
        reader = self.reader
        name = (yield from reader.run(_WORD)).strip()
        if not (yield from reader.one_of(_SEPARATOR)):
            return None
        if name == _KIND:
            name = (yield from reader.run(_WORD)).strip() or name
            if reader.at_end:
                return None
        return name or None

    def _read_arguments(self, name: str) -> Steps[bool]:
        reader = self.reader
        yield from reader.space()
        yield from reader.one_of("```json", "```")
        yield from reader.space()
        if (yield from reader.one_of("{")):
            yield self.begin_call(name)
            yield from read_value(reader, "{", _ENDS, self.arguments)
            yield from self._read_end()
            return True
        ended = yield from reader.one_of(_CALL_END)
        if not ended and not reader.at_end:
            return False
        yield self.begin_call(name)
        if ended:
            yield self.arguments("{}")
        return True

    def _read_end(self) -> Steps[None]:
        """The end of a call; what is none is text."""
        reader = self.reader
        reader.keep()
        yield from reader.space()
        yield from reader.one_of("```")
        yield from reader.space()
        ended = (yield from reader.one_of(_CALL_END)) or (yield from reader.sees(_CALL, _CALLS_END))
        kept = reader.kept()
        if not ended and not reader.at_end:
            yield Text(kept)


class DeepSeekV31Parser(DeepSeekV3Parser):
    """
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>list_files<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    """

    call_start: ClassVar[str] = f"{_CALLS}{_CALL}"
    name_end: ClassVar[str] = _SEPARATOR
    call_end: ClassVar[str] = _CALL_END
    next_call: ClassVar[str | None] = _CALL
