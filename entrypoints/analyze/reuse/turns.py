"""Turns: requests that continue an earlier one's prompt and output, for which continuations and leases could help."""

from __future__ import annotations

from dataclasses import dataclass

from .curve import Curve
from .histogram import Histogram
from .reuse_tree import Access
from .tree_node import Node


@dataclass(slots=True)
class _Ended:
    """The last request that ended at a node. at: time of its end; None for a log without times."""

    tokens: int
    at: float | None
    returned: bool = False


class Turns:
    """curve: reuse distances of the inherited units. gaps: seconds from a request's end to the first request that
    continues it. token_gaps: the gaps, weighted by the tokens of the continued request."""

    def __init__(self, curve: Curve) -> None:
        self.count = 0
        """Requests that continue an earlier one."""
        self.named = 0
        """Requests that named their parent: they were continuations already."""
        self.parents = 0
        """Requests that at least one other continued."""
        self.inherited_units = 0
        self.curve = curve
        self.gaps = Histogram()
        self.token_gaps = Histogram()

    def note_arrival(self, access: Access, limit: int, tokens: int, unit_bytes: int, at: float | None) -> int:
        """Note a prompt of ``tokens`` tokens that has been looked up; at most ``limit`` units may be found. Returns the
        units that it inherits: those of the longest earlier request that it continues."""
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
            self.curve.add_run(above, min(units, left))
            left -= min(units, left)
        if not ended.returned:
            ended.returned = True
            self.parents += 1
            if ended.at is not None and at is not None and at >= ended.at:
                self.gaps.add_value(at - ended.at)
                self.token_gaps.add_value(at - ended.at, ended.tokens)
        return inherited

    def note_end(self, node: Node, tokens: int, at: float | None) -> None:
        """Note the end, at a node, of a request with so many tokens of prompt and output."""
        node.ended = _Ended(tokens, at)


def end_of(node: Node, unit_bytes: int) -> int:
    """Units from the root to the end of a node."""
    return node.start + len(node.key) // unit_bytes
