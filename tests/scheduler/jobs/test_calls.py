"""The keys under which durations are kept, and the text they are learned from."""

from __future__ import annotations

import msgspec

from baton.scheduler.jobs.calls import MAX_COMMAND, MAX_NAME, NO_NAME, ToolCall, name_of, text_of


def test_names() -> None:
    assert name_of(()) == ""
    assert name_of((ToolCall("pytest", "pytest -q"),)) == "pytest"
    assert name_of((ToolCall("ls"), ToolCall("cat"), ToolCall("ls", "ls -l"))) == "cat+ls"


def test_a_call_without_a_name_is_no_human() -> None:
    assert name_of((ToolCall(""),)) == NO_NAME != name_of(())


def test_long_names_are_bounded_and_stay_apart() -> None:
    longest = "x" * MAX_NAME
    assert name_of((ToolCall(longest),)) == longest
    first, second = (name_of((ToolCall(longest + end),)) for end in "ab")
    assert len(first) == len(second) == MAX_NAME and first != second


def test_text_names_the_tool_once() -> None:
    assert text_of(()) == ""
    assert text_of((ToolCall("ls", "ls -l"),)) == "ls -l"
    assert text_of((ToolCall("weather", '{"city": "Rome"}'), ToolCall("ls", "ls"))) == 'weather {"city": "Rome"} ; ls'
    assert len(text_of((ToolCall("ls", "ls " + "x" * MAX_COMMAND),) * 3)) == MAX_COMMAND


def test_calls_cross_the_wire() -> None:
    calls = (ToolCall("ls", "ls -l"), ToolCall("cat"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(calls), type=tuple[ToolCall, ...]) == calls
