"""Calls as JSON between tags: Hermes, Qwen2.5, Qwen3 and many others."""

from __future__ import annotations

from typing import ClassVar

from .json_calls import read_call
from .pieces import ArgumentsForm, Text
from .reader import Steps, StreamParser

_CLOSE = "</tool_call>"


class QwenParser(StreamParser):
    """
    I will read both files.
    <tool_call>
    {"name": "read_file", "arguments": {"path": "a.txt"}}
    </tool_call>
    <tool_call>
    {"name": "read_file", "arguments": {"path": "b.txt"}}
    </tool_call>

    The line break before a tag is part of it, as the chat template writes it. Several calls in one block, a missing
    closing tag, and line breaks more or less are understood. A tag that no call follows is text.
    """

    keeps_special_tokens: ClassVar[bool] = False
    _OPEN: ClassVar[tuple[str, str]] = ("\n<tool_call>", "<tool_call>")

    call_start: ClassVar[str] = '<tool_call>\n{"name": "'
    name_end: ClassVar[str] = '", "arguments":'
    call_end: ClassVar[str] = f"}}\n{_CLOSE}"
    next_call: ClassVar[str | None] = f"\n{call_start}"
    calls_end: ClassVar[str] = ""
    arguments_form: ClassVar[ArgumentsForm] = "json"
    marks_calls: ClassVar[bool] = True

    def _parse(self) -> Steps[None]:
        while marker := (yield from self.words(*self._OPEN)):
            while marker:
                marker = yield from self._read_block(marker)

    def _read_block(self, opening: str) -> Steps[str]:
        """The calls after an opening tag. Returns the opening tag that comes next without words between, or ""."""
        reader = self.reader
        reader.keep(opening)
        yield from reader.space()
        found = yield from reader.one_of("{")
        while found == "{" and (yield from read_call(self, (_CLOSE, self._OPEN[1]))):
            found = yield from self.gap(_CLOSE, self._OPEN[1], "{")
            if not found:
                # Something else stands before the closing tag; the tag is none of it.
                found = yield from self.words(_CLOSE, *self._OPEN)
            reader.keep(found)
        if found in ("", "{"):
            yield Text(reader.kept())
            return ""
        reader.kept()
        return (yield from self.gap(self._OPEN[1])) if found == _CLOSE else found


class HermesParser(QwenParser):
    """The same format, for models that may have the tags as special tokens."""

    keeps_special_tokens: ClassVar[bool] = True
