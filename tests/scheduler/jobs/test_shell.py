"""Which programs a shell command runs."""

from __future__ import annotations

import pytest

from baton.scheduler.jobs.shell import programs


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("ls | make", "ls make"),
        ("a && b || c; d & e\nf", "a b c d e f"),
        ("cd /a && pytest -q 2>&1 | tail -5", "cd pytest tail"),
        ("echo 'a | make' \"; make\"", "echo"),
        ("echo a\\;make", "echo"),
        ("echo \"never closed; make", "echo"),
        ("for f in *.py; do wc -l $f; done", "for wc done"),
        ("if [ -f x ]; then make; else ls; fi", "[ make ls fi"),
        ("FOO=1 sudo -u root timeout -k 5 60 make -j4", "make"),
        ("nice -n 10 env A=1 B=2 xargs -P 4 grep x", "grep"),
        ("uv run --quiet pytest", "pytest"),
        ("uv sync", "uv"),
        ("python3 -m pip install x", "pip"),
        ("bash -lc 'cd x && make'", "cd make"),
        ("sh -c \"bash -c 'make'\"", "make"),
        ("bash script.sh -c make", "bash"),
        ("/usr/bin/make all", "make"),
        ("x=$(make) ; echo `ls`", "make echo ls"),
        ("diff <(ls a) <(wc b)", "diff ls wc"),
        ("cat <<'EOF' > x.py\nmake\n  EOF\nls", "cat ls"),
        ("cat <<EOF\nmake", "cat"),
        ("grep x <<< make\nls", "grep ls"),
        ("run 2>/dev/null &> log && ls >out", "run ls"),
        ("", ""),
        ("env", ""),
        ("> make", ""),
    ],
)  # fmt: skip
def test_programs(command: str, names: str) -> None:
    assert " ".join(words[0] for words in programs(command)) == names


def test_arguments_come_unquoted_and_without_redirections() -> None:
    assert programs("git commit -m 'a; b' >log 2>&1") == [["git", "commit", "-m", "a; b"]]


@pytest.mark.parametrize(
    "piece", ['"', "'", "\\", "<", "$(", '"\\', "bash -c ", "<<a\n", "sudo ", "2>", "`", "$", "\ud800"]
)
def test_any_text_is_taken(piece: str) -> None:
    for command in (piece * 500, "ls " + piece * 500, piece):
        assert all(words for words in programs(command))


def test_scripts_within_scripts_end() -> None:
    command = "make"
    for _ in range(6):
        command = 'bash -c "' + command.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert len(programs(command)) == 1
