"""A tool call as the scheduler sees it: the tool and its arguments. Plain data; it crosses the wire."""

from __future__ import annotations

import re

import msgspec

MAX_COMMAND = 512
"""Longest command in characters; the code that makes a `ToolCall` truncates it."""


_JOINTS = re.compile(r"&&|\|\||[|;&\n]")


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """tool: its name; for a shell command, the program. command: the command line, or the arguments as text.

    A shell command has already been taken apart (entrypoints/step_calls/shell.py): it begins with the tool, has no
    wrappers such as sudo, and none of its arguments contains a mark that joins commands.
    """

    tool: str
    command: str = ""

    @property
    def programs(self) -> list[list[str]]:
        """The commands that this one joins, each as a list of words. For a call that is not a shell command, only the
        tool's name: its arguments may look like anything."""
        if not self.command.startswith(self.tool):
            return [[self.tool]]
        return programs_in(self.command)


MAX_NAMES = 8
"""Most tools in a name; if an answer calls more, the first in alphabetical order stand for all."""


USER = ""
"""The name under which durations are kept after an answer without calls: the time that the user takes to write again.
No tool has it."""

USER_SHOWN = "the user"
"""How that name is shown and saved."""

NAMELESS = "?"
"""Stands for the name of a tool that was called by an empty one."""


def name_of(calls: tuple[ToolCall, ...]) -> str:
    """Name under which durations are kept: the tool's name, or the joined names of tools that run at the same time;
    `USER` without a call."""
    names = sorted({call.tool or NAMELESS for call in calls})
    return "+".join(names[:MAX_NAMES])


def shown_name(calls: tuple[ToolCall, ...]) -> str:
    """What an answer with these calls waits for, for readers."""
    return name_of(calls) or USER_SHOWN


def programs_in(command: str) -> list[list[str]]:
    """The commands that one command line joins, each as a list of words."""
    return [words for part in _JOINTS.split(command) if (words := part.split())]


def text_of(calls: tuple[ToolCall, ...]) -> str:
    """The calls as one text of at most MAX_COMMAND characters, from which the model of durations learns."""
    parts = [call.command if call.command.startswith(call.tool) else f"{call.tool} {call.command}" for call in calls]
    return " ; ".join(parts)[:MAX_COMMAND]
