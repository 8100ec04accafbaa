"""Classifies commands as fast, slow or uncertain: by rules, by known durations, or by a model that learns their words.

The model is a logistic regression on hashed words, trained as durations arrive, BATCH at a time, so that no step of the
scheduler pays for more than one small batch. It needs scikit-learn (`pip install 'baton-serve[learned]'`), which is
imported when the first model is made.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable
from enum import Enum
from importlib import import_module
from typing import Any

import numpy as np

from .calls import ToolCall, programs_in


class Speed(Enum):
    """How soon a tool's calls return."""

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

FEATURES = 1 << 10
"""Length of the vector that a command's features are hashed into."""

COUNTS = 8
"""Places at the end of that vector that hold counts, such as those of pipes and options."""

MAX_PROGRAMS, MAX_WORDS = 8, 24
"""Limits on the programs examined per command, and on the words examined per program."""

BATCH = 16
"""Observations per training step."""

ENOUGH = 64
"""Observations before the model predicts anything; they must include fast and slow commands."""

SURE = 0.8
"""Probability from which the model decides."""

MIDDLE_S = 5.0
"""Seconds; the model predicts whether a call takes longer than this."""

LOOP = re.compile(r"\b(?:for|while|until|xargs|-exec)\b")

NUMBER = re.compile(r"\d+")


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


class LearnedSpeed:
    """Predicts which commands are slow. Predictions depend only on the observations and their order."""

    def __init__(self) -> None:
        try:
            linear_model: Any = import_module("sklearn.linear_model")
        except ImportError as error:
            raise ImportError(
                f"learning from commands needs scikit-learn, which is not there ({error}): "
                "pip install 'baton-serve[learned]', or turn learning off"
            ) from error
        # A constant learning rate learns fast; averaged weights are steadier than the last ones.
        self._model: Any = linear_model.SGDClassifier(
            loss="log_loss", alpha=1e-5, learning_rate="constant", eta0=1.0, average=True, random_state=0
        )
        self._features = np.zeros((BATCH, FEATURES))
        self._slow = np.zeros(BATCH, dtype=np.int64)
        self._seen = [0, 0]
        """Observations so far, by label."""

    def learn_duration(self, command: str, seconds: float) -> None:
        count = sum(self._seen)
        self._features[count % BATCH] = features_of(command)
        slow = int(seconds > MIDDLE_S)
        self._slow[count % BATCH] = slow
        self._seen[slow] += 1
        if (count + 1) % BATCH == 0:
            self._model.partial_fit(self._features, self._slow, classes=(0, 1))

    def learn_durations(self, pairs: Iterable[tuple[str, float]]) -> None:
        for command, seconds in pairs:
            self.learn_duration(command, seconds)

    def slow_probability(self, command: str) -> float | None:
        """Probability that the command takes longer than MIDDLE_S; None until enough was observed."""
        if sum(self._seen) < ENOUGH or not min(self._seen):
            return None
        score = float(features_of(command) @ self._model.coef_[0] + self._model.intercept_[0])
        return 1.0 / (1.0 + math.exp(-min(max(score, -50.0), 50.0)))

    def speed(self, command: str) -> Speed:
        slow = self.slow_probability(command)
        if slow is None or 1.0 - SURE < slow < SURE:
            return Speed.UNCERTAIN
        return Speed.SLOW if slow >= SURE else Speed.FAST


def features_of(command: str) -> np.ndarray:
    """float64 [FEATURES], of length 1: the words of each program, alone and with the program's name, numbers and paths
    made alike; and how many programs, pipes, redirections, loops, options and characters there are."""
    vector = np.zeros(FEATURES)
    parts = programs_in(command)[:MAX_PROGRAMS]
    options = 0
    for words in parts:
        name = words[0]
        vector[_place(name)] += 1.0
        for word in words[1:MAX_WORDS]:
            options += word.startswith("-")
            for form in _forms(word):
                vector[_place(form)] += 0.5
                vector[_place(f"{name} {form}")] += 1.0
    counts = (
        len(parts), command.count("|"), command.count(">") + command.count("<"), len(LOOP.findall(command)), options,
        command.count("&&") + command.count(";"), len(command) / 32.0, command.count("/"),
    )  # fmt: skip
    vector[-COUNTS:] = np.log1p(counts) / 4.0
    return vector / np.linalg.norm(vector) if vector.any() else vector


def _forms(word: str) -> set[str]:
    """The features of an argument: its text with numbers made alike and, for a path, its first folder and its
    ending."""
    plain = NUMBER.sub("0", word)
    if "/" not in word and "." not in word:
        return {plain}
    folder, _, file = plain.rpartition("/")
    return {plain, f"in:{folder.split('/')[0]}", f"ends:{file.rpartition('.')[2][:8]}"}


def _place(feature: str) -> int:
    return zlib.crc32(feature.encode(errors="surrogatepass")) % (FEATURES - COUNTS)
