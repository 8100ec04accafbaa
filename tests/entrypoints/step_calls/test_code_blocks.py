"""The script that an answer without tools asks for."""

from __future__ import annotations

import pytest

from baton.entrypoints.step_calls.call_reader import shell_script

ANSWERS: dict[str, tuple[str, str | None]] = {
    "a block": ("THOUGHT: I look.\n\n```bash\nls -l\n```", "ls -l\n"),
    "words behind": ("```bash\nls\n```\nI wait.", "ls\n"),
    "other labels": ("```sh\na\n```\n```Shell\nb\n```\n```mswea_bash_command\nc\n```", "c\n"),
    "the last one": ("First:\n```bash\nls\n```\nNow:\n```bash\nmake\n```", "make\n"),
    "the last of a shell": ("```bash\nls\n```\n```json\n{}\n```\n```\nout\n```", "ls\n"),
    "not closed": ("```bash\nls -l", "ls -l"),
    "cut off behind its label": ("Now:\n```bash", ""),
    "closed at the end of a line": ("```bash\nls```\nand", "ls"),
    "in one line": ("Run ```bash ls -l``` now", "ls -l"),
    "not at the beginning of a line": ("I run ```bash\nls\n```", "ls\n"),
    "in a list": ("- so:\n  ```bash\n  ls\n  ```\n- done", "  ls\n  "),
    "more about it": ("```bash title=x\nls\n```", "ls\n"),
    "carriage returns": ("```bash\r\nls\r\n```\r\n", "ls\r\n"),
    "tildes": ("~~~bash\nls\n~~~", "ls\n"),
    "a longer fence": ("````bash\ncat <<E\n```\nE\n````", "cat <<E\n```\nE\n"),
    "a block in a block": ("```bash\ncat > a.md <<E\n```sh x\nls\n```\nE\n```", "cat > a.md <<E\n```sh x\nls\n"),
    "a prompt": ("```console\nroot\n$ ls -l\na b\n```", "ls -l\na b\n"),
    "no label, at the end": ("I look.\n```\nls\n```\n \n", "ls\n"),
    "no label, words behind": ("I look.\n```\nls\n```\nDone.", None),
    "no label, twice": ("```\na\n```\n```\nb\n```", "b\n"),
    "in a sentence": ("Call ```ls```", None),
    "another language": ("```python\nprint()\n```", None),
    "no block": ("Use `ls` or bash.", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_shell_script_is_extracted_from_the_answer(case: str) -> None:
    answer, script = ANSWERS[case]
    assert shell_script(answer) == script
