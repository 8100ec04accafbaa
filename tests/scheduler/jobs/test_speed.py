"""What the words of a call say about its speed."""

from __future__ import annotations

import pytest

from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.jobs.speed import FAST, FAST_S, RULES, SLOW, SLOW_S, Rule, Speed, rule_of, speed_between


def shell(command: str) -> tuple[ToolCall, ...]:
    return (ToolCall(command.split()[0], command),)


@pytest.mark.parametrize("command", [
    "ls -la", "cat x.py", "pwd", "head -5 x", "grep -rn make .", "git status", "git -C d diff", "git log --oneline",
    "echo x", "cd /a && ls | wc -l", "make --version", "pip list", "sleep 1", "/bin/cat x",
    "for f in a b; do cat $f; done", "sleep 0.5s",
])  # fmt: skip
def test_fast(command: str) -> None:
    rule = rule_of(shell(command))
    assert rule is not None and rule.speed is Speed.FAST


@pytest.mark.parametrize("command", [
    "make -j4", "pip install x", "pip -q install x", "docker build .", "pytest -q", "npm install", "cargo build",
    "apt-get install -y x", "ls | make", "cd a; make", "ls && python -m pytest", "bash -c 'cd a && make'", "sleep 1m",
    "git clone x", "python setup.py install", "tail -f log", "sudo apt update", "unknown | make", "sleep 5 5",
    "sleep infinity",
])  # fmt: skip
def test_slow(command: str) -> None:
    rule = rule_of(shell(command))
    assert rule is not None and rule.speed is Speed.SLOW


@pytest.mark.parametrize(
    "command", ["python x.py", "git commit -m x", "find /", "ls | unknown", "docker", "sleep x", "sleep 5", "sleep nan"]
)
def test_unknown(command: str) -> None:
    assert rule_of(shell(command)) is None


def test_calls_side_by_side_are_as_slow_as_the_slowest() -> None:
    fast, slow, unknown = shell("ls"), shell("make"), shell("python x.py")
    assert rule_of(fast + fast) == Rule(Speed.FAST, by_name=False)
    assert rule_of(fast + slow) == rule_of(unknown + slow) == Rule(Speed.SLOW, by_name=False)
    assert rule_of(fast + unknown) is None and rule_of(()) is None


def test_arguments_of_other_tools_are_no_commands() -> None:
    assert rule_of((ToolCall("lookup", "make; ls"),)) is None
    assert rule_of((ToolCall("read_file", '{"path": "make"}'),)) == Rule(Speed.FAST, by_name=True)
    assert rule_of((ToolCall("pytest", ""),)) == Rule(Speed.SLOW, by_name=True)


@pytest.mark.parametrize(
    ("tool", "command", "by_name"),
    [
        ("make", "make all", True),
        ("/usr/bin/make", "/usr/bin/make", True),
        ("git", "git status", False),  # the name covers what is slow, too
        ("ls", "ls | make", False),
        ("cd", "cd a && make", False),
        ("python", "python -m pytest", False),  # kept under "python"
    ],
)
def test_when_the_name_alone_decides(tool: str, command: str, by_name: bool) -> None:
    rule = rule_of((ToolCall(tool, command),))
    assert rule is not None and rule.by_name is by_name


def test_tables_do_not_contradict_each_other() -> None:
    assert len(RULES) == len(FAST.split()) + len(SLOW.split())
    assert all(words.count(":") <= 1 and not words.startswith(":") for words in RULES)


def test_speed_between() -> None:
    assert speed_between(0.1, FAST_S) is Speed.FAST and speed_between(SLOW_S, 99.0) is Speed.SLOW
    assert speed_between(0.1, FAST_S + 0.1) is speed_between(SLOW_S - 0.1, 99.0) is Speed.UNCERTAIN
