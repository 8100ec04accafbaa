"""Calls as bare JSON objects: Llama 3.1, 3.2 and 3.3."""

from __future__ import annotations

from typing import ClassVar

from .json_calls import read_call
from .pieces import ArgumentsForm, Text
from .reader import Steps, StreamParser

_TAG = "<|python_tag|>"


class Llama3Parser(StreamParser):
    """
    {"name": "read_file", "parameters": {"path": "a.txt"}}; {"name": "list_files", "parameters": {}}

    An object at the beginning of the answer is a call if its name is that of a tool; any other is text, from the first
    key on that no call has. Behind <|python_tag|>, which may stand anywhere, it is one whatever its name. Further calls
    follow after ";", "," or whitespace.
    """

    keeps_special_tokens: ClassVar[bool] = True

    call_start: ClassVar[str] = '{"name": "'
    name_end: ClassVar[str] = '", "parameters":'
    call_end: ClassVar[str] = "}"
    next_call: ClassVar[str | None] = f"; {call_start}"
    calls_end: ClassVar[str] = ""
    arguments_form: ClassVar[ArgumentsForm] = "json"
    marks_calls: ClassVar[bool] = False

    def _parse(self) -> Steps[None]:
        self.reader.keep()
        yield from self.reader.space()
        found = yield from self.reader.one_of("{", _TAG)
        if not found:
            yield Text(self.reader.kept())
        while found or (found := (yield from self.words(_TAG))):
            yield from self._read_calls(found)
            found = ""

    def _read_calls(self, found: str) -> Steps[None]:
        """Calls from a "{" or a tag on. A "{" was kept, with what stands before it."""
        reader = self.reader
        while found:
            is_marked = found == _TAG
            if is_marked:
                reader.keep(found)
                yield from reader.space()
                found = yield from reader.one_of("{")
            accepts = None if is_marked else self.tools.__contains__
            if not found or not (yield from read_call(self, (_TAG,), accepts)):
                yield Text(reader.kept())
                return
            reader.keep()
            yield from reader.space()
            yield from reader.one_of(";", ",")
            yield from reader.space()
            found = yield from reader.one_of("{", _TAG)
        kept = reader.kept()
        if kept.strip() or not reader.at_end:
            yield Text(kept)
