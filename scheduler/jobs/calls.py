"""A tool call, as the HTTP process reports it to the scheduler, and the key under which its duration is kept."""

from __future__ import annotations

import zlib

import msgspec

MAX_COMMAND = 512
"""Characters of a command that are looked at. Whoever makes a ToolCall cuts there."""

MAX_NAME = 128
"""Characters of a key."""

NO_NAME = "?"
"""Stands for a tool whose name is empty: the empty key means that there was no call at all."""


class ToolCall(msgspec.Struct, frozen=True):
    """One call that a model's answer asks for."""

    tool: str
    """Its name; of a shell command the first word, such as "pytest"."""
    command: str = ""
    """The shell command that really runs, or the arguments as text."""


def name_of(calls: tuple[ToolCall, ...]) -> str:
    """The key of these calls' durations. "" where nothing was called: then somebody answers without a tool, a human for
    example. Parallel calls have a key of their own, the sorted names joined by "+", as their slowest ends the wait. A
    key that is too long ends in a checksum of the whole, so that two which begin alike stay apart."""
    names = "+".join(sorted({call.tool or NO_NAME for call in calls}))
    if len(names) <= MAX_NAME:
        return names
    return f"{names[: MAX_NAME - 9]}~{zlib.crc32(names.encode(errors='surrogatepass')):08x}"


def text_of(calls: tuple[ToolCall, ...]) -> str:
    """What is called, in at most MAX_COMMAND characters: what is learned about durations is learned from this."""
    parts = [call.command if call.command.startswith(call.tool) else f"{call.tool} {call.command}" for call in calls]
    return " ; ".join(parts)[:MAX_COMMAND]
