"""Calls of functions. Where the function is a shell, the tool is the command that it is given: ``bash`` says nothing
of how long it takes, ``pytest`` does."""

from __future__ import annotations

import re
import shlex
from typing import Any

from ...scheduler.jobs.calls import ToolCall
from ..tool_parsers.json_text import loads
from .code_blocks import is_shell
from .shell import MAX_NAME, effective_command, sendable

_NAME_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_SHELL_PARTS = frozenset({"bash", "sh", "zsh", "shell", "terminal", "console", "cmd", "command"})
_SHELL_NAMES = frozenset({"run", "exec", "execute", "container.exec", "process.exec"})
_FIELDS = ("command", "cmd", "script", "commands", "code", "input")
"""Of a shell's arguments, which one is the script; of several, the first in this order."""


def call_of(name: str, arguments: str) -> ToolCall:
    """What a call of this function runs. arguments: their JSON text, which may be cut off."""
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
        if (script := _text(fields.get(field))) is not None:
            return script
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else None


def _text(value: Any) -> str | None:
    """A script as a string, or a command as the list of its words."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return shlex.join(value)
    return None


def _printable(name: str) -> str:
    return "".join(character for character in name[:MAX_NAME] if character.isprintable())
