"""A request of a log, whatever the log's format: what was asked for, as units of a key, and how it can be read."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class BadItem(ValueError):
    """A line, or an item of a list, that is no request; the message says why."""


class LogError(ValueError):
    """The log as a whole cannot be analysed; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Units:
    """What the keys of a log are made of. A unit of ``num_bytes`` stands for ``tokens`` tokens. what: they are made
    of, in words."""

    num_bytes: int
    tokens: int
    what: str


class LoggedRequest(msgspec.Struct, kw_only=True):
    """One prompt, with its outputs as far as they are known.

    prompt, outputs: keys; an output's follows the prompt's. They need not be whole units. prompt_tokens,
    output_tokens: their lengths; the outputs' all together. has_outputs: the outputs' keys are there. time: when it
    arrived, in seconds on any clock; seconds: from there to its end. continues: it named its parent.
    """

    prompt: bytes
    prompt_tokens: int
    outputs: tuple[bytes, ...] = ()
    output_tokens: int = 0
    has_outputs: bool = False
    time: float | None = None
    seconds: float = 0.0
    namespace: str = ""
    continues: bool = False
    hinted: bool = False
    cached_tokens: int | None = None
    """That the server which recorded it found."""
