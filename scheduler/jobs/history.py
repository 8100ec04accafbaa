"""Recent durations of each tool, and of the user apart, in seconds. Bounded; can be saved and loaded again."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque

import msgspec
import numpy as np

from .calls import MAX_COMMAND, USER, USER_SHOWN

PER_TOOL = 256
"""Durations kept per tool; the oldest is dropped first."""

MAX_TOOLS = 1024
"""Tools kept; beyond that, the least recently used one is dropped."""

MAX_NAME_CHARS = 2048
"""Longest tool name accepted from a file; names read from answers are shorter."""

OF_ALL = 4096
"""Durations kept of all tools together."""

COMMANDS = 2048
"""Commands kept with their durations, if a model learns from them."""

_NOTHING = np.empty(0)


class SavedHistory(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """File format of a history. tools: durations by name, the most recently used tool last; in older files the user is
    among them, without a name. user: durations until users wrote again. commands: each with its duration in seconds;
    empty unless a model learns from them."""

    version: int
    tools: dict[str, list[float]]
    user: list[float] = msgspec.field(default_factory=list, name=USER_SHOWN)
    commands: list[tuple[str, float]] = []


class ToolHistory:
    """Durations by the name of the tool (`name_of`). Those of `USER` are kept apart: they count for no tool, and no
    tool's count for the user. with_commands: also keep the commands; the saved history then
    contains them verbatim, including any secrets in them."""

    def __init__(self, with_commands: bool = False) -> None:
        self.commands: deque[tuple[str, float]] = deque(maxlen=COMMANDS if with_commands else 0)
        self._tools: OrderedDict[str, deque[float]] = OrderedDict()
        """Least recently used first."""
        self._user: deque[float] = deque(maxlen=PER_TOOL)
        self._all: deque[float] = deque(maxlen=OF_ALL)
        self.added: Counter[str | None] = Counter()
        """Durations ever added for each tool and the user; None is for all tools."""
        self._sorted: dict[str | None, np.ndarray] = {}
        """Cache of sorted durations, dropped when one is added; None is for all tools."""

    def __len__(self) -> int:
        return len(self._tools)

    def add_duration(self, name: str, seconds: float) -> None:
        """Add a duration of a tool. Raises ValueError unless it is finite and at least 0."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a tool took {seconds} seconds; use a number from 0")
        self.added[name] += 1
        self._sorted.pop(name, None)
        if name == USER:
            self._user.append(seconds)
            return
        durations = self._tools.setdefault(name, deque(maxlen=PER_TOOL))
        durations.append(seconds)
        self._tools.move_to_end(name)
        self._all.append(seconds)
        self.added[None] += 1
        self._sorted.pop(None, None)
        if len(self._tools) > MAX_TOOLS:
            oldest, _ = self._tools.popitem(last=False)
            self._sorted.pop(oldest, None)
            del self.added[oldest]

    def durations_of(self, name: str) -> np.ndarray:
        """float64 [n], ascending; do not modify."""
        return self._in_order(name, self._user if name == USER else self._tools.get(name))

    def all_durations(self) -> np.ndarray:
        """As `durations_of`, for all tools together; the user is not among them."""
        return self._in_order(None, self._all)

    def _in_order(self, key: str | None, durations: deque[float] | None) -> np.ndarray:
        if not durations:
            return _NOTHING
        if key not in self._sorted:
            self._sorted[key] = np.sort(np.array(durations))
        return self._sorted[key]

    def save(self) -> bytes:
        """JSON, for `load`."""
        tools = {name: [round(seconds, 6) for seconds in durations] for name, durations in self._tools.items()}
        commands = [(command, round(seconds, 6)) for command, seconds in self.commands]
        user = [round(seconds, 6) for seconds in self._user]
        return msgspec.json.format(msgspec.json.encode(SavedHistory(1, tools, user, commands)), indent=0)

    def load(self, data: bytes) -> None:
        """Take a saved history in place of this one. Raises ValueError for anything else; then nothing changes."""
        try:
            saved = msgspec.json.decode(data, type=SavedHistory)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"it is no JSON of that form: {error}") from None
        if saved.version != 1:
            raise ValueError(f"its version is {saved.version}; this is version 1")
        loaded = ToolHistory()
        by_name = [*list(saved.tools.items())[-MAX_TOOLS:], (USER, saved.user)]
        for name, durations in by_name:
            if len(name) > MAX_NAME_CHARS:
                raise ValueError(f"a tool's name has {len(name)} characters; use at most {MAX_NAME_CHARS}")
            for seconds in durations[-PER_TOOL:]:
                try:
                    loaded.add_duration(name, seconds)
                except ValueError as error:
                    raise ValueError(f"{name or USER_SHOWN!r}: {error}") from None
        for command, seconds in saved.commands:
            if not (math.isfinite(seconds) and seconds >= 0 and len(command) <= MAX_COMMAND):
                raise ValueError(
                    f"the command {command[:80]!r} took {seconds} seconds; use a number from 0 "
                    f"and at most {MAX_COMMAND} characters"
                )
        self.commands = deque(saved.commands, maxlen=self.commands.maxlen)
        self._tools, self._user, self._all = loaded._tools, loaded._user, loaded._all
        self.added, self._sorted = loaded.added, {}
