"""What requests share with earlier ones: how much of each prompt, and the prefixes that most of it is."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass

from .tree import Node, ReuseTree

LENGTHS = (1, 64, 256, 1024, 4096, 16384, 65536)
"""Shared tokens of a request, in classes: none, 1 to 63, and so on."""

SHARES = (0.001, 0.25, 0.5, 0.75, 0.95)
"""The same as a share of its prompt."""

_SAME = 0.8
"""Of the requests that pass a part of a path, so many must go on to the next for both to be one prefix."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """tokens: its length. requests: that begin with it. saved_tokens: what all but the first need not compute."""

    tokens: int
    requests: int
    saved_tokens: int


class Sharing:
    """Counts requests by what of them was known before."""

    def __init__(self) -> None:
        self.by_length = [0] * (len(LENGTHS) + 1)
        self.by_share = [0] * (len(SHARES) + 1)

    def add(self, prompt_tokens: int, shared_tokens: int) -> None:
        self.by_length[bisect_right(LENGTHS, shared_tokens)] += 1
        self.by_share[bisect_right(SHARES, shared_tokens / prompt_tokens)] += 1


def top_prefixes(tree: ReuseTree, unit_tokens: int, count: int) -> list[SharedPrefix]:
    """Those that save most, of what the tree still has."""
    found = [_whole(node, tree.unit_bytes, unit_tokens) for node in tree.nodes() if node.uses > 1 and _begins(node)]
    return heapq.nlargest(count, found, key=lambda prefix: prefix.saved_tokens)


def _begins(node: Node) -> bool:
    above = node.parent
    return above is None or above.parent is None or node.uses < _SAME * above.uses


def _whole(node: Node, unit_bytes: int, unit_tokens: int) -> SharedPrefix:
    """The prefix that begins with a node and goes on for as long as nearly all requests do."""
    uses, saved = node.uses, 0
    while True:
        units = len(node.key) // unit_bytes
        saved += (node.uses - 1) * units * unit_tokens
        below = max((node.children or {}).values(), key=lambda child: child.uses, default=None)
        if below is None or below.uses < 2 or below.uses < _SAME * node.uses:
            return SharedPrefix((node.start + units) * unit_tokens, uses, saved)
        node = below
