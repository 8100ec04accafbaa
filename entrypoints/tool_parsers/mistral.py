"""Calls behind [TOOL_CALLS]: Mistral's models, older and newer."""

from __future__ import annotations

import re
from typing import ClassVar

from .json_calls import read_call
from .json_text import read_value
from .pieces import ArgumentsForm, Text
from .reader import Steps, StreamParser

_MARK = "[TOOL_CALLS]"
_NAME = re.compile(r"[\w.\-/]*")


class MistralParser(StreamParser):
    """
    [TOOL_CALLS] [{"name": "read_file", "arguments": {"path": "a.txt"}}, {"name": "list_files", "arguments": {}}]
    [TOOL_CALLS]read_file[ARGS]{"path": "a.txt"}[TOOL_CALLS]list_files[ARGS]{}

    The first is what models up to Mistral Small 3.1 write, the second what came after; both are read, and also a call
    id between name and arguments (``read_file[CALL_ID]k3m9x1q7a[ARGS]``). The ids are passed over.
    """

    keeps_special_tokens: ClassVar[bool] = True

    call_start: ClassVar[str] = f'{_MARK} [{{"name": "'
    name_end: ClassVar[str] = '", "arguments":'
    call_end: ClassVar[str] = "}"
    next_call: ClassVar[str | None] = ', {"name": "'
    calls_end: ClassVar[str] = "]"
    arguments_form: ClassVar[ArgumentsForm] = "json"
    marks_calls: ClassVar[bool] = True

    def _parse(self) -> Steps[None]:
        while (yield from self.words(_MARK)):
            following = _MARK
            while following:
                following = yield from self._read_calls()

    def _read_calls(self) -> Steps[str]:
        """Read the text behind the mark. Returns the mark if it comes next without words between, or ""."""
        reader = self.reader
        reader.keep(_MARK)
        yield from reader.space()
        if (yield from reader.sees(_MARK)):
            yield Text(reader.kept())
            return (yield from reader.one_of(_MARK))
        opening = yield from reader.one_of("[", "{")
        if opening == "[":
            is_call = yield from self._read_list()
        elif opening:
            is_call = yield from read_call(self)
        else:
            is_call = yield from self._read_named()
        if not is_call:
            yield Text(reader.kept())
            return ""
        reader.kept()
        return (yield from self.gap(_MARK))

    def _read_list(self) -> Steps[bool]:
        """Read a list of calls from behind its "[". False if it ends in something else, which is kept."""
        reader = self.reader
        yield from reader.space()
        while (yield from reader.one_of("{")) and (yield from read_call(self)):
            reader.keep()
            yield from reader.space()
            ended = yield from reader.one_of("]", ",")
            if ended != ",":
                # A list that is not closed has ended, too; it must not take the words behind it.
                return bool(ended) or reader.at_end or bool((yield from reader.sees(_MARK)))
            yield from reader.space()
        return False

    def _read_named(self) -> Steps[bool]:
        reader = self.reader
        name = yield from reader.run(_NAME)
        yield from reader.space()
        mark = yield from reader.one_of("[ARGS]", "[CALL_ID]")
        if mark == "[CALL_ID]":
            yield from reader.run(_NAME)
            mark = yield from reader.one_of("[ARGS]")
        yield from reader.space()
        if name and (yield from reader.one_of("{")):
            yield self.begin_call(name)
            yield from read_value(reader, "{", give=self.arguments)
            return True
        if name and mark and reader.at_end:
            yield self.begin_call(name)
            return True
        return False


class MistralArgsParser(MistralParser):
    """The same, for models that write the second form: only a forced call begins otherwise."""

    call_start: ClassVar[str] = _MARK
    name_end: ClassVar[str] = "[ARGS]"
    call_end: ClassVar[str] = ""
    next_call: ClassVar[str | None] = _MARK
    calls_end: ClassVar[str] = ""
