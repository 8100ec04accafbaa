"""Harmony, the format of the gpt-oss models: messages on channels, between special tokens.

    <|channel|>analysis<|message|>I need the file.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>{"path": "a.txt"}<|call|>

in one line; the prompt ends with ``<|start|>assistant``. Read here and not by the package ``openai-harmony``: that
downloads its vocabulary when it is first used, so it cannot start on a machine without a network; and it takes token
ids, where the answers that Baton parses are text.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import ClassVar

from .json_text import read_value
from .pieces import ArgumentsForm, Reasoning, Text
from .reader import Steps, StreamParser

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BEGINS = (_START, _CHANNEL)
_CHANNEL_OF = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT_OF = re.compile(r"(?:^|\s|>)to=([^\s<]+)")
_NAMESPACE = "functions."
_TO = f"to={_NAMESPACE}"


class HarmonyParser(StreamParser):
    """Splits an answer into messages. What is done with thoughts and calls is up to the parsers of the two rooms.

    The words of all other messages are text, without the marks around them; marks that make no message are text, too,
    and so are messages to others than functions (the built-in tools, which Baton does not have), marks included.
    """

    keeps_special_tokens: ClassVar[bool] = True
    message_begins: ClassVar[tuple[str, ...]] = _BEGINS
    message_ends: ClassVar[tuple[str, ...]] = (*_ENDS, *_BEGINS)
    """Marks that end a message, or begin the next without an end."""
    thoughts: ClassVar[type[Text] | type[Reasoning]]
    """The kind of piece that the words on the channel ``analysis`` become."""

    is_inside: bool = False
    """True if the answer begins inside of a message on the channel ``analysis``."""

    @abstractmethod
    def read_function_call(self, name: str) -> Steps[str]:
        """Read a message to a function from its first word on; its header was kept. Returns the mark that ended it."""

    def _parse(self) -> Steps[None]:
        if self.is_inside:
            found = self._kept_begin((yield from self.read_words(self.thoughts)))
        else:
            found = yield from self._read_beginning()
        while found or (found := (yield from self._words_before_message())):
            found = yield from self._read_message()

    def _words_before_message(self) -> Steps[str]:
        found = yield from self.words(*_BEGINS)
        self.reader.keep(found)
        return found

    def _read_beginning(self) -> Steps[str]:
        """The first mark of the first message, kept, if the answer begins with it; its header may have begun in the
        prompt."""
        self.reader.keep()
        yield from self.reader.space()
        found = yield from self.reader.one_of(_TO, *_BEGINS)
        if not found:
            yield Text(self.reader.kept())
        return found

    def read_words(self, kind: type[Text] | type[Reasoning]) -> Steps[str]:
        """Give out the words of a message; return the mark that ended it."""
        while True:
            text, mark = self.reader.split(self.message_ends)
            if text:
                yield kind(text)
            if mark or self.reader.at_end:
                return mark
            yield None

    def _read_message(self) -> Steps[str]:
        """Read a message; its first mark was kept. Returns the first mark of the next if that ended this one, or ""."""
        reader = self.reader
        mark = ""
        while not mark and not reader.at_end:
            _, mark = reader.split((_MESSAGE, _START, *_ENDS))
            if not mark and not reader.at_end:
                yield None
        header = reader.kept()
        if mark != _MESSAGE:
            yield Text(header)
            return ""
        channel, recipient = _CHANNEL_OF.search(header), _RECIPIENT_OF.search(header)
        name = recipient[1] if recipient else ""
        function = name.removeprefix(_NAMESPACE)
        if function and (function != name or name in self.tools):
            reader.keep(header)
            mark = yield from self.read_function_call(function)
        elif channel and channel[1] == "analysis" and not name:
            mark = yield from self.read_words(self.thoughts)
        elif name:
            yield Text(header)
            mark = yield from self.read_words(Text)
            if mark in _ENDS:
                yield Text(mark)
        else:
            mark = yield from self.read_words(Text)
        return self._kept_begin(mark)

    def _kept_begin(self, mark: str) -> str:
        """The mark, kept, if a message begins with it, else ""."""
        if mark not in _BEGINS:
            return ""
        self.reader.keep(mark)
        return mark


class GptOssParser(HarmonyParser):
    """
    <|channel|>commentary to=functions.read_file <|constrain|>json<|message|>{"path": "a.txt"}<|call|>

    The recipient may stand before the channel, and the channel may be another: what is said to a function is a call.
    Thoughts become text here; with a reasoning parser before this one, none arrive.
    """

    thoughts: ClassVar[type[Text] | type[Reasoning]] = Text

    call_start: ClassVar[str] = f"{_CHANNEL}commentary to={_NAMESPACE}"
    name_end: ClassVar[str] = f" <|constrain|>json{_MESSAGE}"
    call_end: ClassVar[str] = "<|call|>"
    next_call: ClassVar[str | None] = None
    calls_end: ClassVar[str] = ""
    arguments_form: ClassVar[ArgumentsForm] = "json"
    marks_calls: ClassVar[bool] = True

    def read_function_call(self, name: str) -> Steps[str]:
        reader = self.reader
        yield from reader.space()
        if (yield from reader.one_of("{")):
            yield self.begin_call(name)
            yield from read_value(reader, "{", self.message_ends, self.arguments)
            mark = (yield from self.gap(*self.message_ends)) or (yield from self.words(*self.message_ends))
            return (yield from self.gap(*_BEGINS)) if mark in _ENDS else mark
        mark = yield from reader.one_of(*_ENDS)
        if mark or reader.at_end:
            yield self.begin_call(name)
            if mark:
                yield self.arguments("{}")
            return (yield from self.gap(*_BEGINS))
        yield Text(reader.kept())
        mark = yield from self.read_words(Text)
        if mark in _ENDS:
            yield Text(mark)
        return mark
