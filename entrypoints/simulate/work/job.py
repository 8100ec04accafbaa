"""An agent's job as the simulator plays it: turns of a model, each with a tool call behind it.

    turn k's prompt:   | kept of turn k-1's prompt + output |  new tokens |
                        `kept` tokens                         `new` tokens: the tool's output, the user's words
    then the model says `output` tokens, a tool runs for `tool_s` seconds, and turn k+1 begins

Token ids are made up but real: a job counts its own upwards, so that two jobs share nothing but their system prompt,
and a turn finds in the tree what the turns before it left there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

EOS = 0
"""Ends each output."""

ID_LIMIT = 2**31 - 1
SYSTEM_IDS = 2**28
"""Ids from 1 to here are those of system prompts; jobs take theirs above."""

SYSTEM_STRIDE = 2**17
"""Room for the longest system prompt."""


@dataclass(frozen=True, slots=True)
class Turn:
    kept: int
    """Leading tokens of the turn before it that its prompt begins with; of a first turn the system prompt's."""
    new: int
    output: int
    """Tokens that the model says, the eos among them; no later prompt has that one."""
    tool: str | None = None
    """What is called at its end; "" for nothing that can be named, None if nobody reads its text."""
    tool_s: float = 0.0

    @property
    def prompt(self) -> int:
        """Its length in tokens."""
        return self.kept + self.new

    @property
    def known(self) -> int:
        """The most tokens that the next turn can keep."""
        return self.prompt + self.output - 1


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    arrival: float
    turns: tuple[Turn, ...]
    first_id: int
    system: int = 0
    """Which system prompt the first turn's kept tokens are; jobs with the same share them."""

    @property
    def own_tokens(self) -> int:
        """Ids that it uses up."""
        return sum(turn.new + turn.output - 1 for turn in self.turns)

    @property
    def tool_s(self) -> float:
        return sum(turn.tool_s for turn in self.turns)

    @property
    def longest(self) -> int:
        """Tokens of its longest turn, output included."""
        return max(turn.prompt + turn.output for turn in self.turns)


def numbered(jobs: list[Job]) -> list[Job]:
    """The same jobs, each with ids of its own. Where ids run out the first come again, long after their jobs' ends."""
    first, given = SYSTEM_IDS, []
    for job in jobs:
        if first + job.own_tokens > ID_LIMIT:
            first = SYSTEM_IDS
        given.append(Job(job.name, job.arrival, job.turns, first, job.system))
        first += job.own_tokens
    return given


@dataclass(slots=True)
class Conversation:
    """The tokens of a job, as far as it has got."""

    job: Job
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """int32: the last turn's prompt, and what the model said to it without the eos."""
    _used: int = 0

    def begin(self, number: int) -> tuple[np.ndarray, list[int]]:
        """A turn's prompt (int32), and what the model will say to it. Turns are begun in order."""
        turn = self.job.turns[number]
        kept = self.ids[: turn.kept] if number else system_prompt(self.job.system, turn.kept)
        said = self._next(turn.new + turn.output - 1)
        self.ids = np.concatenate([kept, said])
        return self.ids[: turn.prompt], [*self.ids[turn.prompt :].tolist(), EOS]

    def _next(self, count: int) -> np.ndarray:
        start = self.job.first_id + self._used
        self._used += count
        return np.arange(start, start + count, dtype=np.int32)


def system_prompt(number: int, length: int) -> np.ndarray:
    """int32 [length]"""
    start = 1 + (number * SYSTEM_STRIDE) % (SYSTEM_IDS - SYSTEM_STRIDE)
    return np.arange(start, start + length, dtype=np.int32)
