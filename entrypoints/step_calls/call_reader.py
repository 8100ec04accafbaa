"""Reads the calls out of a whole answer: those of functions, or else the shell script that it asks for.

It is given the text alone, once it has ended; neither the request's tools nor its prompt. So whatever an answer calls
by name is taken for a tool, and whether the prompt has opened a thought is seen by its end. A call in a thought is
none. What is read is used to guess how long the tool takes: nothing is refused here, and nothing raised.
"""

from __future__ import annotations

import re

from ...scheduler.jobs.calls import ToolCall
from ..reasoning_parsers.output_parser import OutputParser
from ..reasoning_parsers.reasoning_parser import ReasoningParser
from ..reasoning_parsers.registry import choose as choose_reasoning
from ..reasoning_parsers.registry import reasoning_parser
from ..tool_parsers.pieces import CallArguments, CallBegins, Piece, Text, ToolSpec
from ..tool_parsers.registry import choose as choose_tools
from ..tool_parsers.registry import tool_parser
from .code_blocks import shell_script
from .shell import effective_command
from .shell_tools import call_of

MAX_ANSWER = 200_000
"""Characters at the end of an answer that are looked at: a call is the last thing that a model writes."""

MAX_CALLS = 32
"""Of one answer; its first ones."""

_MAX_NAMES = 16
_NAMES = {
    "llama3": re.compile(r'"name"\s*+:\s*+"([^"\\]++)"'),
    "pythonic": re.compile(r"(?:^[ \t]*+\[|\),)\s*+([^\W\d][\w.]*+)\(", re.MULTILINE),
    "qwen3_coder": re.compile(r"<function=([^<>\s]++)>"),
}
"""By parser: the names that it only takes for calls if there are tools of these names."""

_BARE_FORMS = (
    ("llama3", re.compile(r'\s*+\{\s*+"'), ""),
    ("mistral", re.compile(r'\s*+\[\s*+\{\s*+"'), "[TOOL_CALLS]"),
)
"""How answers begin that have lost the marks before a call, which may be special tokens; and a mark to put there."""


class CallReader:
    """One per server. tools, reasoning: the names of its parsers; None where none is known, and then the answer itself
    shows its form."""

    def __init__(self, tools: str | None = None, reasoning: str | None = None) -> None:
        """Raises ValueError for a name that is not known."""
        for name, parser in ((tools, tool_parser), (reasoning, reasoning_parser)):
            if name is not None:
                parser(name)
        self._tools, self._reasoning = tools, reasoning

    def read_calls(self, answer: str) -> tuple[ToolCall, ...]:
        """In order; empty if the answer calls nothing."""
        words = self._without_thoughts(answer[-MAX_ANSWER:])
        called = _function_calls(self._tools or choose_tools(words), words) or _bare_calls(words)
        if called:
            return tuple(call_of(name, arguments) for name, arguments in called)
        script = shell_script(words)
        command = effective_command(script) if script is not None else None
        return (command,) if command is not None else ()

    def _without_thoughts(self, answer: str) -> str:
        name = self._reasoning or choose_reasoning(answer)
        if name is None:
            return answer
        parser = reasoning_parser(name)
        return _text(OutputParser(parser(begins_inside=_ends_thought(parser, answer))), answer)


def _ends_thought(parser: type[ReasoningParser], answer: str) -> bool:
    """Whether it ends a thought that it has not begun."""
    end = answer.find(parser.end)
    return end >= 0 and parser.start not in answer[:end]


def _text(parser: OutputParser, answer: str) -> str:
    return "".join(piece.text for piece in parser.push(answer) + parser.finish() if isinstance(piece, Text))


def _function_calls(name: str | None, words: str) -> list[tuple[str, str]]:
    """(name, JSON text of the arguments) of the first calls, as the parser of this name reads them."""
    if name is None:
        return []
    names = dict.fromkeys(_NAMES[name].findall(words)) if name in _NAMES else {}
    parser = tool_parser(name)([ToolSpec(each) for each in list(names)[:_MAX_NAMES]])
    return _calls(parser.push(words) + parser.finish())


def _calls(pieces: list[Piece]) -> list[tuple[str, str]]:
    names: list[str] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallBegins):
            if len(names) == MAX_CALLS:
                break
            names.append(piece.name)
            arguments.append([])
        elif isinstance(piece, CallArguments):
            arguments[-1].append(piece.delta)
    return [(name, "".join(deltas)) for name, deltas in zip(names, arguments, strict=True)]


def _bare_calls(words: str) -> list[tuple[str, str]]:
    """Calls as JSON at the beginning of the answer, without a mark."""
    if '"arguments"' not in words and '"parameters"' not in words:
        return []
    for name, begins, mark in _BARE_FORMS:
        if begins.match(words):
            return _function_calls(name, mark + words)
    return []
