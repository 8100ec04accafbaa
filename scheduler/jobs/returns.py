"""How many conversations go beyond a turn that called no tool, by client and kind of turn: learned, since no end of a
conversation is ever sent.

After such a turn it is the user who may write again. A turn counts as continued when the next one arrives; as not
continued once it has been away for longer than nearly all that returned, or when its job is forgotten. One that returns
even later has been counted wrongly, and is corrected.

The turns of other clients tell what is likely of a client, and its leases are ranked by that. To end one takes its own
turns (`share_shown`): otherwise a flood of one client's single questions would end the leases of all others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum

MAX_CLIENTS = 1024
"""Clients on record; beyond that, the one whose last turn was counted longest ago is forgotten."""

WINDOW = 256
"""Turns of a client and kind at which their counts are halved, so that old ones fade."""

PRIOR_WORTH = 4.0
"""The turns that an expectation is worth: that of all clients together counts as much for each of them."""


class TurnKind(IntEnum):
    """Kinds of turns without a tool call."""

    OPENING = 0
    """The first of a conversation whose client named no job and asked for no lease: most one-shot requests look just
    like it."""
    ANSWER = 1
    """One that came after tool calls: what an agent says when its work is done."""
    TALK = 2
    """Any other: the user has written before, and may again."""
    NAMED = 3
    """The first of a conversation whose client named the job or asked for a lease. It tells nothing of later turns, nor
    those of it: single questions may have names, too."""


FIRST_TURNS = frozenset({TurnKind.OPENING, TurnKind.NAMED})

PRIOR_SHARE = {TurnKind.OPENING: 0.25, TurnKind.ANSWER: 0.5, TurnKind.TALK: 0.75, TurnKind.NAMED: 0.75}
"""The share that is expected to be continued before anything is known."""


@dataclass(slots=True)
class _Counts:
    ended: float = 0.0
    continued: float = 0.0

    def add(self, continued: bool) -> None:
        self.ended += 1.0
        self.continued += continued
        if self.ended > WINDOW:
            self.ended /= 2
            self.continued /= 2

    def share(self, prior: float) -> float:
        return (self.continued + PRIOR_WORTH * prior) / (self.ended + PRIOR_WORTH)


def _counts() -> tuple[_Counts, ...]:
    return tuple(_Counts() for _ in TurnKind)


@dataclass(slots=True)
class Returns:
    """Owns the counts."""

    _all: tuple[_Counts, ...] = field(default_factory=_counts)
    _by_client: OrderedDict[str, tuple[_Counts, ...]] = field(default_factory=OrderedDict)

    def record_turn(self, client: str, kind: TurnKind, *, continued: bool) -> None:
        self._all[kind].add(continued)
        self._by_client.setdefault(client, _counts())[kind].add(continued)
        self._by_client.move_to_end(client)
        if len(self._by_client) > MAX_CLIENTS:
            self._by_client.popitem(last=False)

    def correct_turn(self, client: str, kind: TurnKind) -> None:
        """Record that a turn which counted as not continued has been continued after all."""
        for counts in (self._all, self._by_client.get(client)):
            if counts is not None:
                counts[kind].continued = min(counts[kind].continued + 1.0, counts[kind].ended)

    def share_continued(self, client: str, kind: TurnKind) -> float:
        """The share of the client's turns of this kind that is expected to be continued, between 0 and 1."""
        overall = self._all[kind].share(PRIOR_SHARE[kind])
        known = self._by_client.get(client)
        return known[kind].share(overall) if known is not None else overall

    def share_shown(self, client: str, kind: TurnKind) -> float:
        """As `share_continued`, but no less than the client's own turns show: those of others can only raise it."""
        own, known = PRIOR_SHARE[kind], self._by_client.get(client)
        if known is not None:
            own = known[kind].share(known[kind].share(own))  # as `share_continued` if there were no other clients
        return max(own, self.share_continued(client, kind))
