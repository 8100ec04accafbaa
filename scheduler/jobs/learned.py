"""A model that learns from their words which commands are slow; used where rules and history leave doubt.

A logistic regression on hashed words, trained as durations arrive, BATCH at a time, so that no step of the scheduler
pays for more than one small batch. It needs scikit-learn (`pip install -e '.[learned]'`), which is imported when the
first model is made.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np

from .calls import programs_in
from .speed import Speed

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


class LearnedSpeed:
    """Predicts which commands are slow. Predictions depend only on the observations and their order."""

    def __init__(self) -> None:
        try:
            linear_model: Any = import_module("sklearn.linear_model")
        except ImportError as error:
            raise ImportError(
                f"learning from commands needs scikit-learn, which is not there ({error}): "
                "pip install -e '.[learned]', or turn learning off"
            ) from error
        # A constant learning rate learns fast; averaged weights are steadier than the last ones.
        self._model: Any = linear_model.SGDClassifier(
            loss="log_loss", alpha=1e-5, learning_rate="constant", eta0=1.0, average=True, random_state=0
        )
        self._features = np.zeros((BATCH, FEATURES))
        self._slow = np.zeros(BATCH, dtype=np.int64)
        self._seen = [0, 0]
        """Observations so far, by label."""

    def observe(self, command: str, seconds: float) -> None:
        count = sum(self._seen)
        self._features[count % BATCH] = features_of(command)
        slow = int(seconds > MIDDLE_S)
        self._slow[count % BATCH] = slow
        self._seen[slow] += 1
        if (count + 1) % BATCH == 0:
            self._model.partial_fit(self._features, self._slow, classes=(0, 1))

    def observe_all(self, pairs: Iterable[tuple[str, float]]) -> None:
        for command, seconds in pairs:
            self.observe(command, seconds)

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
