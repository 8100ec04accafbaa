"""Thoughts between two tags: most models that think. The formats are data, a class each."""

from __future__ import annotations

from typing import ClassVar

from ..tool_parsers.pieces import Reasoning, Text
from ..tool_parsers.reader import Steps, StreamParser
from .output_parser import opens_thought


class TaggedParser(StreamParser):
    """
    <think>
    The user greets me.
    </think>

    Hello!

    The answer may begin with the start tag, or inside of the thought, if the prompt has opened it (some models repeat
    the tag then; the repetition is dropped). The line breaks that templates write are dropped, and no more: one after
    the start tag, one before the end tag, two after it. Thought is all up to the first end tag: tool calls in it are
    no calls. Without an end tag, the whole answer is.

    Anywhere else tags are text, a second thought, too. SGLang agrees, but takes a first start tag in the middle of an
    answer as one, which loses the rest of an answer that speaks of it; and for Qwen3 and GLM it lets a thought end
    where "<tool_call>" appears.
    """

    keeps_special_tokens: ClassVar[bool] = False
    start: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    resumes: ClassVar[str] = "\n</think>\n\n"
    answer_start: ClassVar[str] = ""
    _usually_inside: ClassVar[bool] = False

    def __init__(self, *, begins_inside: bool | None = None) -> None:
        super().__init__()
        self.is_inside = self._usually_inside if begins_inside is None else begins_inside

    @classmethod
    def begins_inside(cls, prompt_text: str) -> bool:
        return opens_thought(prompt_text, cls.start, cls.end)

    def _parse(self) -> Steps[None]:
        reader = self.reader
        space = yield from reader.space()
        if (yield from reader.one_of(self.start)):
            yield from reader.one_of("\n")
            yield from self._read_thought()
        elif self.is_inside:
            yield Reasoning(space.removeprefix("\n"))
            yield from self._read_thought()
        else:
            yield Text(space)
        while not reader.at_end:
            yield Text(reader.take_text(reader.unread))
            if not reader.at_end:
                yield None

    def _read_thought(self) -> Steps[None]:
        """The thought, its end tag, and the line breaks behind that."""
        reader = self.reader
        while True:
            text, tag = reader.split((f"\n{self.end}", self.end))
            if text:
                yield Reasoning(text)
            if tag:
                yield from reader.one_of("\n")
                yield from reader.one_of("\n")
                return
            if reader.at_end:
                return
            yield None


class DeepSeekR1Parser(TaggedParser):
    """Begins inside of the thought unless told: R1's template opens it, or the model goes without a start tag."""

    _usually_inside: ClassVar[bool] = True


class KimiParser(TaggedParser):
    """◁think▷The user greets me.◁/think▷Hello!"""

    keeps_special_tokens: ClassVar[bool] = True
    start: ClassVar[str] = "◁think▷"
    end: ClassVar[str] = "◁/think▷"
    resumes: ClassVar[str] = "◁/think▷"


class MistralReasoningParser(TaggedParser):
    """[THINK]The user greets me.[/THINK]Hello!"""

    keeps_special_tokens: ClassVar[bool] = True
    start: ClassVar[str] = "[THINK]"
    end: ClassVar[str] = "[/THINK]"
    resumes: ClassVar[str] = "[/THINK]"
