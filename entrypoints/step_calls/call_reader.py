"""Reads the calls out of a whole answer: those of functions, or else the shell script that it asks for.

The reader gets the complete text only, neither the request's tools nor its prompt. So any name that the answer calls
counts as a tool, and only the end of a thought shows that the prompt has opened one. Calls inside a thought do not
count. The result predicts how long the tool takes, so this code refuses nothing and never raises.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, NamedTuple

from ...scheduler.jobs.calls import ToolCall
from ..reasoning_parsers.output_parser import OutputParser, ReasoningParser
from ..reasoning_parsers.registry import choose as choose_reasoning
from ..reasoning_parsers.registry import reasoning_parser
from ..tool_parsers.json_text import loads
from ..tool_parsers.pieces import CallArguments, CallBegins, Piece, Text, ToolSpec
from ..tool_parsers.registry import choose as choose_tools
from ..tool_parsers.registry import tool_parser
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


# -- shell scripts in code blocks --------------------------------------------------------------------------------------

_SHELL_LABELS = frozenset(
    {
        "bash",
        "sh",
        "shell",
        "zsh",
        "console",
        "terminal",
        "shell-session",
        "shellsession",
        "execute_bash",
        "mswea_bash_command",
    }
)
_FENCE = re.compile(r"`{3,}+|~{3,}+")
_PROMPT = re.compile(r"^[ \t]*+\$[ \t]", re.MULTILINE)


class _Block(NamedTuple):
    """label: its language, in lower case. end: of the block, fence included."""

    label: str
    script: str
    end: int


def is_shell(label: str) -> bool:
    """True for the name of a shell, or for another usual label of blocks with shell commands."""
    return label.lower() in _SHELL_LABELS


def shell_script(answer: str) -> str | None:
    """The script that the answer asks for; None if it asks for none. Agents without tools write it into a code block.

    The last block counts: prompts for such agents ask for the action at the end of the answer, and earlier blocks
    quote, propose or remember. A block without a closing fence counts too, as the fence is a usual stop string. A block
    without a language counts only where no block is marked as shell, and if it ends the answer.
    """
    blocks = _blocks(answer)
    marked = [block for block in blocks if is_shell(block.label)]
    if marked:
        return _without_output(marked[-1].script)
    if blocks and not blocks[-1].label and not answer[blocks[-1].end :].strip():
        return _without_output(blocks[-1].script)
    return None


def _blocks(answer: str) -> list[_Block]:
    blocks: list[_Block] = []
    at, line_end = 0, -1
    while fence := _FENCE.search(answer, at):
        marks, start = fence[0], fence.end()
        if line_end < start:
            line_end = answer.find("\n", start)
            line_end = line_end if line_end >= 0 else len(answer)
        in_line = answer.find(marks, start, line_end)
        if in_line >= 0:  # ```bash ls```, or code within a sentence
            label, _, script = answer[start:in_line].strip().partition(" ")
            at = in_line + len(marks)
        else:
            label = answer[start:line_end].strip().partition(" ")[0]
            close = re.compile(rf"{marks}[ \t\r]*+$", re.MULTILINE).search(answer, line_end)
            script = answer[line_end + 1 : close.start() if close else len(answer)]
            at = close.end() if close else len(answer)
        blocks.append(_Block(label.lower(), script, at))
    return blocks


def _without_output(script: str) -> str:
    """From the first line on that begins with a prompt, if one does: what stands before it is output."""
    prompt = _PROMPT.search(script)
    return script[prompt.end() :] if prompt else script
