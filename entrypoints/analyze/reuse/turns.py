"""Requests that go on from an earlier one's prompt and output: what continuations and leases could do for them."""

from __future__ import annotations

from dataclasses import dataclass

from .curve import Curve
from .histogram import Histogram
from .tree import Access, Node


@dataclass(slots=True)
class _Ended:
    """Of the last request that ended at a node. at: when it ended; None where the log has no times."""

    tokens: int
    at: float | None
    returned: bool = False


class Turns:
    """curve: the reuse distances of what was inherited. gaps: seconds from a request's end to the first that goes on
    from it, weighted by the tokens that it had; requests: the same, each counting once."""

    def __init__(self, curve: Curve) -> None:
        self.count = 0
        """Requests that go on from an earlier one."""
        self.named = 0
        """Of all requests: those that named their parent, so that they were continuations already."""
        self.parents = 0
        """Requests that one or more went on from."""
        self.inherited_units = 0
        self.curve = curve
        self.gaps = Histogram()
        self.token_gaps = Histogram()

    def arrived(self, access: Access, limit: int, tokens: int, unit_bytes: int, at: float | None) -> int:
        """A prompt of ``tokens`` tokens has been looked up, of which ``limit`` units may be found. Returns the units
        that it inherits: those of the longest earlier request that it goes on from."""
        for node in reversed(access.path):
            ended = node.ended
            if ended is not None and ended.tokens < tokens and end_of(node, unit_bytes) <= limit:
                break
        else:
            return 0
        inherited = end_of(node, unit_bytes)
        self.count += 1
        self.inherited_units += inherited
        left = inherited
        for above, units in access.runs:
            self.curve.add(above, min(units, left))
            left -= min(units, left)
        if not ended.returned:
            ended.returned = True
            self.parents += 1
            if ended.at is not None and at is not None and at >= ended.at:
                self.gaps.add(at - ended.at)
                self.token_gaps.add(at - ended.at, ended.tokens)
        return inherited

    def ended(self, node: Node, tokens: int, at: float | None) -> None:
        """A request whose prompt and output have so many tokens has ended at a node."""
        node.ended = _Ended(tokens, at)


def end_of(node: Node, unit_bytes: int) -> int:
    """Units from the root to the end of a node."""
    return node.start + len(node.key) // unit_bytes
