"""What a model does on one task of a coding agent, by tool calls or as blocks of text, and what its commands print."""

from __future__ import annotations

import json

COMMANDS = [
    "grep -rn 'hullo' src | head -n 5",
    "sed -n '1,20p' src/greet.py",
    "sed -i 's/hullo/hello, \"wörld\"/' src/greet.py && git diff",
    "cat <<'EOF' > check.py\nimport greet\nprint(greet.words())\nEOF",
    "python check.py",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
]


def task_of(way: str, number: int) -> str:
    """way: tool or text, how the model acts. number: any, which tells tasks apart."""
    return f"The {number}. greeting is misspelt, see {way}-issue-0."


def output_of(way: str, number: int) -> str:
    """number: from 1. Non-ASCII, so that templates which escape it show."""
    return f'src/greet.py:{number}:     return "hullo ü" \\ {way}-issue-{number}\n'


def swe_script() -> list[list[str]]:
    """For `scripted_worker`: a command for the task, and for each output but the last."""

    def answer(way: str, command: str) -> str:
        if way == "text":
            return f"THOUGHT: Look at it.\n\n```mswea_bash_command\n{command}\n```\n"
        call = json.dumps({"name": "bash", "arguments": {"command": command}}, ensure_ascii=False)
        return f"Look at it.\n<tool_call>\n{call}\n</tool_call>"

    return [
        [f"{way}-issue-{number}", answer(way, command)]
        for way in ("tool", "text")
        for number, command in enumerate(COMMANDS)
    ]
