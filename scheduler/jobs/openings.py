"""How many conversations go beyond their first turn, by client: learned, since no end of a conversation is ever sent.

An opening is the first turn of a conversation whose client named no job and asked for no lease, answered without a
tool call: then it is the user who may write again, and most one-shot requests look just like that. It counts as
continued when the next turn arrives, and as not continued when none has come for as long as any pin lasts, or when the
job is forgotten before.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_CLIENTS = 1024
"""Clients on record; beyond that, the one whose last opening is the oldest is forgotten."""

WINDOW = 256
"""Openings of a client at which its counts are halved, so that old ones fade."""

PRIOR_SHARE, PRIOR_WORTH = 0.25, 4.0
"""The expected share before anything is known, and the openings that an expectation is worth: that of all clients
together counts as much for each of them."""


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


class Openings:
    """Owns the counts."""

    def __init__(self) -> None:
        self._all = _Counts()
        self._by_client: OrderedDict[str, _Counts] = OrderedDict()

    def record_opening(self, client: str, *, continued: bool) -> None:
        self._all.add(continued)
        self._by_client.setdefault(client, _Counts()).add(continued)
        self._by_client.move_to_end(client)
        if len(self._by_client) > MAX_CLIENTS:
            self._by_client.popitem(last=False)

    def share_continued(self, client: str) -> float:
        """The share of the client's openings that is expected to be continued, between 0 and 1."""
        overall = self._all.share(PRIOR_SHARE)
        known = self._by_client.get(client)
        return known.share(overall) if known is not None else overall
