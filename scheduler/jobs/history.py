"""The durations of tool calls so far, by key and of all keys together, bounded, and their form in a file.

A duration is the time from the end of a job's step to the arrival of its next one: the tool, and what the client and
the network add. The file is JSON, so that people can look into it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Annotated

import msgspec
import numpy as np

from .calls import MAX_COMMAND, MAX_NAME
from .posterior import LogNormal

MAX_PER_TOOL, MAX_TOOLS, MAX_OVERALL, MAX_COMMANDS = 256, 1024, 4096, 2048
"""Durations kept of one key; keys, the one used longest ago goes first; durations of all keys; commands."""

PRIOR_EVERY = 64
"""So many observations apart the prior is computed anew (each time before the first so many)."""

LONGEST_S = 1e9
"""Longer ones are refused as nonsense: 32 years."""

VERSION = 1

MAX_BYTES = 64 << 20
"""Of a file. A full history takes a quarter of it."""

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=LONGEST_S)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Command = Annotated[str, msgspec.Meta(max_length=MAX_COMMAND)]


class _Version(msgspec.Struct):
    version: int


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    """A history as plain data: oldest first, tools by their last use."""

    version: int
    overall: Annotated[list[Seconds], msgspec.Meta(max_length=MAX_OVERALL)]
    tools: Annotated[
        dict[Name, Annotated[list[Seconds], msgspec.Meta(min_length=1, max_length=MAX_PER_TOOL)]],
        msgspec.Meta(max_length=MAX_TOOLS),
    ]
    commands: Annotated[list[tuple[Command, Seconds]], msgspec.Meta(max_length=MAX_COMMANDS)]


class Ring:
    """The last durations, up to a number."""

    def __init__(self, size: int) -> None:
        self.count = 0
        """That were ever added."""
        self._kept = np.empty(size)

    def add(self, seconds: float) -> None:
        self._kept[self.count % len(self._kept)] = seconds
        self.count += 1

    def seconds(self) -> np.ndarray:
        """float64 [kept], a copy, oldest first."""
        size, start = len(self._kept), self.count % len(self._kept)
        return self._kept[:start].copy() if self.count < size else np.roll(self._kept, -start)


class History:
    """Durations by key. keep_commands: also the commands themselves, with their durations; they are written to the file
    as they are, secrets in them included, so they are kept only where something is learned from them."""

    def __init__(self, keep_commands: bool = False) -> None:
        self.overall = Ring(MAX_OVERALL)
        self.prior = LogNormal.prior(np.empty(0))
        """What to expect of any tool; depends on nothing but the durations so far and their number."""
        self.commands: deque[tuple[str, float]] = deque(maxlen=MAX_COMMANDS if keep_commands else 0)
        self._tools: OrderedDict[str, Ring] = OrderedDict()

    def __len__(self) -> int:
        """Keys."""
        return len(self._tools)

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    def seconds(self, name: str) -> np.ndarray:
        """float64 [kept], oldest first; empty for a key never seen. Reading does not count as use."""
        ring = self._tools.get(name)
        return ring.seconds() if ring is not None else np.empty(0)

    def add(self, name: str, command: str, seconds: float) -> list[str]:
        """Keep a duration, in whole microseconds. Returns the keys that are forgotten for it."""
        if not 0.0 <= seconds <= LONGEST_S:
            raise ValueError(f"a tool call took {seconds} s: a duration lies between 0 and {LONGEST_S:g} s")
        seconds = round(seconds, 6)
        ring = self._tools.get(name)
        if ring is None:
            ring = self._tools[name] = Ring(MAX_PER_TOOL)
        self._tools.move_to_end(name)
        ring.add(seconds)
        self.commands.append((command, seconds))
        self.overall.add(seconds)
        if self.overall.count < PRIOR_EVERY or self.overall.count % PRIOR_EVERY == 0:
            self._renew_prior()
        forgotten = [self._tools.popitem(last=False)[0]] if len(self._tools) > MAX_TOOLS else []
        return forgotten

    def save(self) -> bytes:
        tools = {name: ring.seconds().tolist() for name, ring in self._tools.items()}
        saved = _Saved(VERSION, self.overall.seconds().tolist(), tools, list(self.commands))
        return msgspec.json.encode(saved)

    def load(self, data: bytes) -> None:
        """Take a saved history's place. Raises ValueError, with nothing changed, if it is none."""
        saved = _decode(data)
        self.overall = Ring(MAX_OVERALL)
        for seconds in saved.overall:
            self.overall.add(seconds)
        self._tools = OrderedDict()
        for name, kept in saved.tools.items():
            ring = self._tools[name] = Ring(MAX_PER_TOOL)
            for seconds in kept:
                ring.add(seconds)
        self.commands = deque(saved.commands, maxlen=self.commands.maxlen)
        self._renew_prior()

    def _renew_prior(self) -> None:
        self.prior = LogNormal.prior(self.overall.seconds())


def _decode(data: bytes) -> _Saved:
    if len(data) > MAX_BYTES:
        raise ValueError(f"a tool history of {len(data)} bytes: no more than {MAX_BYTES} are read; start without it")
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            raise ValueError(f"a tool history of version {version}: this is version {VERSION}; start without the file")
        return msgspec.json.decode(data, type=_Saved)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no tool history: {error}; mend the file or start without it") from error
