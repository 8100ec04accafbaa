"""The shell script that an answer asks to have run: agents without tools write it into a code block.

    THOUGHT: I look for it.

    ```bash
    grep -rn TODO .
    ```

Where there are several, the last one counts: prompts for such agents ask for the action at the end of the answer, and
what stands before it quotes, proposes or remembers. A block that is not closed is one as well: the closing fence is a
usual stop string. A block without a language counts only where no block is marked as shell, and if it ends the answer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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
    """True for the name of a shell, or another label that people give blocks of its commands."""
    return label.lower() in _SHELL_LABELS


def shell_script(answer: str) -> str | None:
    """The script that the answer asks for; None if it asks for none."""
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
