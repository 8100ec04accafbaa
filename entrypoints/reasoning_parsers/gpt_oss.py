"""The thoughts of gpt-oss: messages on the channel ``analysis``."""

from __future__ import annotations

from typing import ClassVar

from ..tool_parsers.harmony import HarmonyParser
from ..tool_parsers.json_text import read_value
from ..tool_parsers.pieces import Reasoning, Text
from ..tool_parsers.reader import Steps
from .output_parser import opens_thought


class GptOssReasoningParser(HarmonyParser):
    """
    <|channel|>analysis<|message|>The user greets me.<|end|><|start|>assistant<|channel|>final<|message|>Hello!

    Calls become text, marks included, so that the tool parser behind this one finds them. A model may think again
    between two messages; that is reasoning, too.
    """

    start: ClassVar[str] = "<|channel|>analysis<|message|>"
    end: ClassVar[str] = "<|end|>"
    resumes: ClassVar[str] = "<|end|><|start|>assistant"
    answer_start: ClassVar[str] = "<|channel|>final<|message|>"
    thoughts: ClassVar[type[Text] | type[Reasoning]] = Reasoning

    def __init__(self, *, begins_inside: bool | None = None) -> None:
        super().__init__()
        self.is_inside = bool(begins_inside)

    @classmethod
    def begins_inside(cls, prompt_text: str) -> bool:
        return opens_thought(prompt_text, cls.start, cls.end)

    def read_function_call(self, name: str) -> Steps[str]:
        reader = self.reader
        yield Text(reader.kept())
        space = yield from reader.space()
        yield Text(space)
        if (yield from reader.one_of("{")):
            # A mark in a string of the arguments is none.
            yield from read_value(reader, "{", self.message_ends, Text)
        mark = yield from self.read_words(Text)
        if mark not in self.message_begins:
            yield Text(mark)
        return mark
