"""One node of the cache's history (history.py): plain data."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Departure(Enum):
    """How tokens left the cache."""

    EVICTED = "evicted"
    """The device needed their memory."""
    EXPIRED = "expired"
    """Evicted; the last to hold them was a lease that ran out."""
    RELEASED = "released"
    """Evicted; they had been given up: their job was over, their lease was released, or they were not to be reused."""
    DROPPED = "dropped"
    """They had left the device, and the tier that kept them gave them up."""
    CLEARED = "cleared"
    """The cache was emptied, or they could not be trusted."""
    PAGE = "page"
    """They were computed, but did not fill a page."""


class Pressure(NamedTuple):
    """The request that needed memory."""

    client: str
    rid: str | None
    """None: the running requests, for their next tokens."""


class PastNode:
    """A run of tokens below ``parent``. Splits leave the object the lower part, so that it stays on every path that it
    was on; it may be referred to from a path that ends further up."""

    __slots__ = ("children", "client", "departure", "end", "key", "left_at", "live", "parent", "pressure", "start")

    def __init__(self, parent: PastNode | None, start: int, end: int, key: bytes) -> None:
        self.parent = parent
        """None for the root of a namespace."""
        self.start = start
        """Position of its first token in the sequence."""
        self.end = end
        """The position after its last token."""
        self.key = key
        """Token ids, int32."""
        self.children: dict[bytes, PastNode] = NO_CHILDREN
        """By the first token id."""
        self.live = 0
        """Nodes of the cache's tree that hold these tokens."""
        self.departure: Departure | None = None
        self.left_at = 0.0
        self.pressure: Pressure | None = None
        self.client = ""
        """The client of the request that computed it when it was not live; "" if it is unknown."""

    def __repr__(self) -> str:
        fate = "live" if self.live else self.departure
        return f"PastNode({self.start} … {self.end}, {fate}, {len(self.children)} children)"


NO_CHILDREN: dict[bytes, PastNode] = {}
"""The children of all nodes that never had any, which are most: one object for all of them, and always empty."""
