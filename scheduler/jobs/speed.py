"""Classifies tools as fast, slow or uncertain: first by rules on the command, then by the tool's known durations."""

from __future__ import annotations

from enum import Enum

from .calls import ToolCall


class Speed(Enum):
    FAST = "fast"
    SLOW = "slow"
    UNCERTAIN = "uncertain"


_FAST = {
    "ls", "cat", "pwd", "echo", "head", "tail", "wc", "grep", "rg", "sed", "awk", "sort", "uniq", "cut", "tr", "diff",
    "stat", "file", "which", "whoami", "date", "env", "printenv", "mkdir", "touch", "cp", "mv", "rm", "ln", "chmod",
    "basename", "dirname", "realpath", "tree", "nl", "less", "true", "printf", "test", "ps", "kill", "id", "uname",
    "git status", "git diff", "git log", "git show", "git branch", "git add", "git commit", "git checkout",
    "git stash", "git rev-parse", "git blame", "git ls-files",
    "cd", "export", "set", "source", ".", "[", "[[", "for", "case", "done", "fi", "esac", "}", "exit",
}  # fmt: skip
_SLOW = {
    "make", "cmake", "ninja", "bazel", "gradle", "mvn", "ant", "tox", "nox", "pytest", "unittest", "jest", "docker",
    "podman", "docker-compose", "apt", "apt-get", "yum", "dnf", "apk", "brew", "conda", "mamba", "poetry", "uv",
    "sleep", "wget", "curl", "scp", "rsync", "ssh", "terraform", "ansible-playbook", "rustc", "javac", "nvcc",
    "pip install", "pip download", "pip wheel", "npm install", "npm ci", "npm test", "npm run", "yarn", "pnpm",
    "cargo build", "cargo test", "cargo run", "cargo check", "go build", "go test", "go get", "git clone", "git pull",
    "git fetch", "git push", "git submodule", "python setup.py", "mypy", "pyright",
}  # fmt: skip
_UNCERTAIN = {"docker ps", "docker images", "docker inspect", "uv --version"}
"""Exceptions to the slow programs above: an entry of two words takes precedence over one of a single word."""


def by_rules(calls: tuple[ToolCall, ...]) -> Speed:
    """Classify by the commands alone; the slowest counts. Without a call the result is uncertain: a user has to
    answer."""
    return slowest([_of_program(words) for call in calls for words in call.programs])


def slowest(speeds: list[Speed]) -> Speed:
    for speed in (Speed.SLOW, Speed.UNCERTAIN, Speed.FAST):
        if speed in speeds:
            return speed
    return Speed.UNCERTAIN


def by_times(soon: float, late: float, *, fast_s: float, slow_s: float) -> Speed:
    """Classify by two quantiles of the duration in seconds: most calls have returned by ``late``, few by ``soon``."""
    if late <= fast_s:
        return Speed.FAST
    return Speed.SLOW if soon >= slow_s else Speed.UNCERTAIN


def _of_program(words: list[str]) -> Speed:
    """Classify a program with its arguments: `git -C folder status` counts as `git status`."""
    name, *arguments = words
    for known in (*(f"{name} {argument}" for argument in arguments), name):
        for table, speed in ((_UNCERTAIN, Speed.UNCERTAIN), (_FAST, Speed.FAST), (_SLOW, Speed.SLOW)):
            if known in table:
                return speed
    return Speed.UNCERTAIN
