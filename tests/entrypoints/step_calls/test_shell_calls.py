"""Functions that run shell commands, and others."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from baton.entrypoints.step_calls.call_reader import call_of
from baton.scheduler.jobs.calls import MAX_COMMAND, ToolCall

PYTEST = ToolCall("pytest", "pytest -q")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("bash", {"command": "cd /x && pytest -q"}),
        ("Bash", {"command": "pytest -q", "description": "Run the tests", "timeout": 30}),
        ("execute_bash", {"command": "pytest -q", "is_input": "false"}),
        ("run_shell_command", {"command": "pytest -q", "dir_path": "/x"}),
        ("run_terminal_cmd", {"command": "pytest -q"}),
        ("runInTerminal", {"command": "pytest -q", "explanation": "x"}),
        ("terminal", {"script": "pytest -q", "cwd": "/"}),
        ("execute", {"code": "pytest -q"}),
        ("execute_command", {"cmd": "pytest -q"}),
        ("exec", {"language": "bash", "code": "pytest -q"}),
        ("shell", {"command": ["bash", "-lc", "cd x; pytest -q"]}),
        ("container.exec", {"cmd": ["pytest", "-q"], "workdir": "/x"}),
        ("bash", {"commands": ["pytest", "-q"]}),
        ("shell", {"text": "pytest -q", "seconds": 3}),
    ],
)
def test_shell_tool_call_is_the_command_it_runs(name: str, fields: dict[str, Any]) -> None:
    assert call_of(name, json.dumps(fields)) == PYTEST


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("read_file", '{"path": "a.txt"}'),
        ("str_replace_based_edit_tool", '{"command": "view", "path": "/x"}'),
        ("execute_python", '{"code": "import os"}'),
        ("publish", '{"command": "x"}'),  # no part of its name is "sh"
        ("execute", '{"language": "python", "code": "import os"}'),
        ("bash", '{"restart": true}'),
        ("bash", '{"first": "a", "second": "b"}'),
        ("bash", '{"command": ["ls", 1]}'),
        ("bash", '{"command": []}'),
        ("bash", '{"command": "# nothing"}'),
        ("bash", '{"command": "py'),
        ("bash", '["ls"]'),
        ("bash", '"ls"'),
        ("bash", ""),
    ],
)
def test_other_tool_call_is_its_name(name: str, arguments: str) -> None:
    assert call_of(name, arguments) == ToolCall(name, arguments)


def test_call_is_truncated_and_encodable() -> None:
    call = call_of("a\nb" * 100, "ü\ud800" * 1000)
    assert call.tool == ("ab" * 100)[: len(call.tool)] and len(call.command) == MAX_COMMAND
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=ToolCall) == call
    assert call_of("bash", r'{"command": "ls \ud83d"}') == ToolCall("ls", "ls ?")


def test_deeply_nested_arguments_are_truncated() -> None:
    deep = '{"command": ' + "[" * 50_000
    assert call_of("bash", deep + "]" * 50_000 + "}") == ToolCall("bash", deep[:MAX_COMMAND])
