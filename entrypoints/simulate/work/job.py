"""An agent's job as the simulator plays it: turns of a model, each followed by a tool call.

    turn k's prompt:   | kept of turn k-1's prompt + output |  new tokens |
                        `kept` tokens                         `new` tokens: the tool's output, the user's words
    then the model generates `output` tokens, a tool runs for `tool_s` seconds, and turn k+1 begins

The prompts have token ids: each job counts its own upwards, so that two jobs share nothing but their system prompt, and
a turn finds in the tree the KV that the job's earlier turns left there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

EOS = 0
"""Ends each output."""

ID_LIMIT = 2**31 - 1
SYSTEM_IDS = 2**28
"""System prompts have ids from 1 to here; jobs have theirs above."""

SYSTEM_STRIDE = 2**17
"""Room for the longest system prompt."""


@dataclass(frozen=True, slots=True)
class Turn:
    kept: int
    """Leading tokens that its prompt shares with the previous turn, or in a first turn with the system prompt."""
    new: int
    output: int
    """Tokens that the model generates, including the eos, which no later prompt has."""
    tool: str | None = None
    """The tool called at its end; "" if the server reads the text and finds no call, None if it does not read it."""
    tool_s: float = 0.0

    @property
    def prompt(self) -> int:
        """Its length in tokens."""
        return self.kept + self.new

    @property
    def known(self) -> int:
        """Limit of ``kept`` in the next turn."""
        return self.prompt + self.output - 1


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    arrival: float
    turns: tuple[Turn, ...]
    first_id: int
    system: int = 0
    """Number of the system prompt that the first turn's kept tokens are from; jobs with the same number share it."""

    @property
    def own_tokens(self) -> int:
        """Number of ids that it uses up."""
        return sum(turn.new + turn.output - 1 for turn in self.turns)

    @property
    def tool_s(self) -> float:
        return sum(turn.tool_s for turn in self.turns)

    @property
    def longest(self) -> int:
        """Tokens of its longest turn, output included."""
        return max(turn.prompt + turn.output for turn in self.turns)


def numbered(jobs: list[Job]) -> list[Job]:
    """The same jobs, each with its own ids. Ids are reused when they run out, long after their first jobs ended."""
    first, given = SYSTEM_IDS, []
    for job in jobs:
        if first + job.own_tokens > ID_LIMIT:
            first = SYSTEM_IDS
        given.append(Job(job.name, job.arrival, job.turns, first, job.system))
        first += job.own_tokens
    return given


@dataclass(slots=True)
class Conversation:
    """The tokens of a job up to its current turn."""

    job: Job
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """int32: the last turn's prompt and its output without the eos."""
    _used: int = 0

    def begin_turn(self, number: int) -> tuple[np.ndarray, list[int]]:
        """(a turn's prompt as int32, its output). Turns must begin in order."""
        turn = self.job.turns[number]
        kept = self.ids[: turn.kept] if number else system_prompt(self.job.system, turn.kept)
        said = self._next_ids(turn.new + turn.output - 1)
        self.ids = np.concatenate([kept, said])
        return self.ids[: turn.prompt], [*self.ids[turn.prompt :].tolist(), EOS]

    def _next_ids(self, count: int) -> np.ndarray:
        start = self.job.first_id + self._used
        self._used += count
        return np.arange(start, start + count, dtype=np.int32)


def system_prompt(number: int, length: int) -> np.ndarray:
    """int32 [length]"""
    start = 1 + (number * SYSTEM_STRIDE) % (SYSTEM_IDS - SYSTEM_STRIDE)
    return np.arange(start, start + length, dtype=np.int32)
