"""Reads the calls out of a whole answer: those of functions, or else the shell script that it asks for.

It is given the text alone, once it has ended; neither the request's tools nor its prompt. So whatever an answer calls
by name is taken for a tool, and whether the prompt has opened a thought is seen by its end. A call in a thought is
none. What is read is used to guess how long the tool takes: nothing is refused here, and nothing raised.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from ...scheduler.jobs.calls import ToolCall
from ..reasoning_parsers.output_parser import OutputParser
from ..reasoning_parsers.reasoning_parser import ReasoningParser
from ..reasoning_parsers.registry import choose as choose_reasoning
from ..reasoning_parsers.registry import reasoning_parser
from ..tool_parsers.json_text import loads
from ..tool_parsers.pieces import CallArguments, CallBegins, Piece, Text, ToolSpec
from ..tool_parsers.registry import choose as choose_tools
from ..tool_parsers.registry import tool_parser
from .code_blocks import is_shell, shell_script
from .shell import MAX_NAME, effective_command, sendable

MAX_ANSWER = 200_000
"""Characters at the end of an answer that are looked at: a call is the last thing that a model writes."""

MAX_CALLS = 32
"""Most calls that are read of one answer; the first ones."""

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

_NAME_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_SHELL_PARTS = frozenset({"bash", "sh", "zsh", "shell", "terminal", "console", "cmd", "command"})
_SHELL_NAMES = frozenset({"run", "exec", "execute", "container.exec", "process.exec"})
_FIELDS = ("command", "cmd", "script", "commands", "code", "input")
"""Arguments of a shell that may hold the script; of several, the first in this order."""


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
    """True if the answer ends a thought that it has not begun."""
    end = answer.find(parser.end)
    return end >= 0 and parser.start not in answer[:end]


def _text(parser: OutputParser, answer: str) -> str:
    return "".join(piece.text for piece in parser.push_text(answer) + parser.finish() if isinstance(piece, Text))


def _function_calls(name: str | None, words: str) -> list[tuple[str, str]]:
    """(name, JSON text of the arguments) of the first calls, as the parser of this name reads them."""
    if name is None:
        return []
    names = dict.fromkeys(_NAMES[name].findall(words)) if name in _NAMES else {}
    parser = tool_parser(name)([ToolSpec(each) for each in list(names)[:_MAX_NAMES]])
    return _calls(parser.push_text(words) + parser.finish())


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


# -- functions that are shells -----------------------------------------------------------------------------------------


def call_of(name: str, arguments: str) -> ToolCall:
    """The tool that a call of this function runs: for a shell, the command that it is given, since ``bash`` says
    nothing about how long the command takes. arguments: their JSON text, which may be cut off."""
    script = _script(arguments) if _runs_commands(name) else None
    found = effective_command(script) if script is not None else None
    return found or ToolCall(_printable(name), sendable(arguments))


def _runs_commands(name: str) -> bool:
    if name.lower() in _SHELL_NAMES:
        return True
    return any(part.lower() in _SHELL_PARTS for part in _NAME_PARTS.findall(name[:MAX_NAME]))


def _script(arguments: str) -> str | None:
    """The script among these arguments; None if none of them is clearly one."""
    try:
        fields = loads(arguments)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    language = fields.get("language")
    if isinstance(language, str) and not is_shell(language):
        return None
    for field in _FIELDS:
        if (script := _script_text(fields.get(field))) is not None:
            return script
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else None


def _script_text(value: Any) -> str | None:
    """A script as a string, or a command as the list of its words."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return shlex.join(value)
    return None


def _printable(name: str) -> str:
    return "".join(character for character in name[:MAX_NAME] if character.isprintable())
