"""Sharing between requests: how much of each prompt earlier ones had, and which prefixes save most."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from dataclasses import dataclass

from .reuse_tree import ReuseTree
from .tree_node import Node

LENGTHS = (1, 64, 256, 1024, 4096, 16384, 65536)
"""Class limits of a request's shared tokens: none, 1 to 63, and so on."""

SHARES = (0.001, 0.25, 0.5, 0.75, 0.95)
"""Class limits of the shared part of a request's prompt."""

_SAME = 0.8
"""Share of the requests that must continue from one part of a path to the next for both to be one prefix."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """tokens: its length. requests: number of requests that begin with it. saved_tokens: tokens that all requests but
    the first need not compute."""

    tokens: int
    requests: int
    saved_tokens: int


class Sharing:
    """Counts requests by the part of their prompt that earlier ones had."""

    def __init__(self) -> None:
        self.by_length = [0] * (len(LENGTHS) + 1)
        self.by_share = [0] * (len(SHARES) + 1)

    def add_request(self, prompt_tokens: int, shared_tokens: int) -> None:
        self.by_length[bisect_right(LENGTHS, shared_tokens)] += 1
        self.by_share[bisect_right(SHARES, shared_tokens / prompt_tokens)] += 1


def top_prefixes(tree: ReuseTree, unit_tokens: int, count: int) -> list[SharedPrefix]:
    """The ``count`` prefixes that save most, among those still in the tree."""
    found = [_whole(node, tree.unit_bytes, unit_tokens) for node in tree.nodes() if node.uses > 1 and _begins(node)]
    return heapq.nlargest(count, found, key=lambda prefix: prefix.saved_tokens)


def _begins(node: Node) -> bool:
    above = node.parent
    return above is None or above.parent is None or node.uses < _SAME * above.uses


def _whole(node: Node, unit_bytes: int, unit_tokens: int) -> SharedPrefix:
    """The prefix that begins with a node and extends as far as nearly all of its requests."""
    uses, saved = node.uses, 0
    while True:
        units = len(node.key) // unit_bytes
        saved += (node.uses - 1) * units * unit_tokens
        below = max((node.children or {}).values(), key=lambda child: child.uses, default=None)
        if below is None or below.uses < 2 or below.uses < _SAME * node.uses:
            return SharedPrefix((node.start + units) * unit_tokens, uses, saved)
        node = below
