"""A request of a log in any format, its prompt and outputs as keys, and the errors of reading."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class BadItem(ValueError):
    """A line, or an element of an array, is not a request; the message says why."""


class LogError(ValueError):
    """The log as a whole cannot be analysed; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a log's keys: ``num_bytes`` bytes stand for ``tokens`` tokens. what: a description of the units."""

    num_bytes: int
    tokens: int
    what: str


class LoggedRequest(msgspec.Struct, kw_only=True):
    """One prompt, with its outputs as far as they are known.

    prompt, outputs: keys, not necessarily of whole units; an output's key follows the prompt's. prompt_tokens,
    output_tokens: lengths of the prompt and of all outputs together. has_outputs: the outputs' keys are known. time: of
    arrival, in seconds on any clock; seconds: from arrival to end. continues: it named its parent. hinted: it had
    ``no_reuse_from``. state_points, retain_states: as in RequestSpec, for models with recurrent states. is_aborted: its
    output was cut short.
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
    state_points: tuple[int, ...] = ()
    retain_states: int = 1
    is_aborted: bool = False
    cached_tokens: int | None = None
    """Prompt tokens that the recording server found in its cache; None where the log does not tell."""
    missed: dict[str, int] = {}
    """Reason -> prompt tokens that it did not find; empty where the log does not tell."""
