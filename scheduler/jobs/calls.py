"""A call of a tool, as the scheduler hears of it: which tool, and with what. Plain data; it crosses the wire."""

from __future__ import annotations

import msgspec

MAX_COMMAND = 512
"""Characters of a command that are kept, by whoever makes the call."""


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """tool: its name; of a shell command its first word. command: what is run, or the arguments as text."""

    tool: str
    command: str = ""
