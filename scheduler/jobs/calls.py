"""A call of a tool, as the scheduler hears of it: which tool, and with what. Plain data; it crosses the wire."""

from __future__ import annotations

import re

import msgspec

MAX_COMMAND = 512
"""Characters of a command that are kept, by whoever makes the call."""


_JOINTS = re.compile(r"&&|\|\||[|;&\n]")


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """tool: its name; of a shell command the program. command: what is run, or the arguments as text.

    Whoever makes it has taken a command apart already (entrypoints/step_calls/shell.py): it begins with the tool, has
    no wrappers such as sudo, and no argument that holds one of the marks that join commands.
    """

    tool: str
    command: str = ""

    @property
    def programs(self) -> list[list[str]]:
        """The commands that are joined in this one, each as its words. The arguments of what is no shell command may
        look like anything: there the tool's name is all."""
        if not self.command.startswith(self.tool):
            return [[self.tool]]
        return programs_in(self.command)


MAX_NAMES = 8
"""Tools in a name: an answer with more of them is called after these."""


def name_of(calls: tuple[ToolCall, ...]) -> str:
    """Under which times are kept: the tool's name; of several that run at the same time, all. "" for no call: then
    somebody thinks, and answers."""
    names = sorted({call.tool for call in calls})
    return "+".join(names[:MAX_NAMES])


def programs_in(command: str) -> list[list[str]]:
    """The commands that are joined in one, each as its words."""
    return [words for part in _JOINTS.split(command) if (words := part.split())]


def text_of(calls: tuple[ToolCall, ...]) -> str:
    """What is called, in at most MAX_COMMAND characters: what is learned about durations is learned from this."""
    parts = [call.command if call.command.startswith(call.tool) else f"{call.tool} {call.command}" for call in calls]
    return " ; ".join(parts)[:MAX_COMMAND]
