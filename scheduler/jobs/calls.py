"""A call of a tool, as the scheduler hears of it: which tool, and with what. Plain data; it crosses the wire."""

from __future__ import annotations

import msgspec

MAX_COMMAND = 512
"""Characters of a command that are kept, by whoever makes the call."""


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """tool: its name; of a shell command its first word. command: what is run, or the arguments as text."""

    tool: str
    command: str = ""


MAX_NAMES = 8
"""Tools in a name: an answer with more of them is called after these."""


def name_of(calls: tuple[ToolCall, ...]) -> str:
    """Under which times are kept: the tool's name; of several that run at the same time, all. "" for no call: then
    somebody thinks, and answers."""
    names = sorted({call.tool for call in calls})
    return "+".join(names[:MAX_NAMES])


def text_of(calls: tuple[ToolCall, ...]) -> str:
    """What is called, in at most MAX_COMMAND characters: what is learned about durations is learned from this."""
    parts = [call.command if call.command.startswith(call.tool) else f"{call.tool} {call.command}" for call in calls]
    return " ; ".join(parts)[:MAX_COMMAND]
