"""Counts, on a sample, KV that was evicted too early: it is computed again soon after.

    recording: what is evicted leaves a ghost ──an eighth of the pool──▶ watching ──as much as the pool──▶ recording
                                                                                    evicted: all ghosts go

A ghost is the tokens of an evicted node and its place in the tree. KV that is computed again while its ghost is there
would have been found in a pool of about twice the size. It is a sample, because an account of every node would cost a
few percent of all the work on the tree. (Ghosts of evicted entries, to judge a cache by, are known from ARC, Megiddo
and Modha, 2003.)

It is a lower bound. A ghost is found by the node it hung on, or by that node's ghost; where that one has been computed
again by itself before, the ghosts below it are lost.
"""

from __future__ import annotations

from ..node import ID_BYTES, TreeNode
from ..tree import common_prefix

SAMPLED = 8
"""A sample has this part of the pool's tokens."""


class GhostSample:
    """Ghosts of one tree, over a pool of ``pool_tokens``. The owner reports how much is evicted: see `next_at`."""

    MAX_GHOSTS = 1 << 14

    def __init__(self, pool_tokens: int, page_size: int) -> None:
        self._pool_tokens = pool_tokens
        self._page_bytes = page_size * ID_BYTES
        self._ghosts: dict[tuple[int, object], tuple[int, bytes]] = {}
        """(serial of the node above, key there) -> (serial, tokens)"""
        self.parents: set[int] = set()
        """Nodes below which there are ghosts, or were."""
        self.recording = True
        self.next_at = pool_tokens // SAMPLED
        """Call `go_on` once so many tokens have been evicted in all."""
        self.recorded_tokens = 0
        self.recomputed_tokens = 0

    def __len__(self) -> int:
        return len(self._ghosts)

    def clear(self) -> None:
        """The tree is gone. What was recorded of it does not come back."""
        self._ghosts.clear()
        self.parents.clear()

    def go_on(self, evicted_tokens: int) -> None:
        """Stop recording, or begin the next sample."""
        self.recording = not self.recording
        if self.recording:
            self.clear()
        self.next_at = evicted_tokens + (self._pool_tokens // SAMPLED if self.recording else self._pool_tokens)

    def record(self, node: TreeNode) -> None:
        """A node leaves the cache; it is still in the tree."""
        if len(self._ghosts) >= self.MAX_GHOSTS:
            return
        parent = node.parent
        assert parent is not None
        self.recorded_tokens += len(node)
        self._put(parent.serial, node.child_key, node.serial, node.key)

    def stored(self, node: TreeNode) -> None:
        """A node is new in the tree, below one of ``parents``. Ghosts of its tokens are counted, and gone."""
        parent = node.parent
        assert parent is not None
        key, offset = node.key, 0
        ghost = self._ghosts.pop((parent.serial, node.child_key), None)
        while ghost is not None:
            serial, tokens = ghost
            if not key.startswith(tokens, offset):
                common = common_prefix(key, offset, tokens)
                common -= common % self._page_bytes
                offset += common
                if offset == len(key):  # the rest may come with the prompt's next chunk
                    rest = tokens[common:]
                    self._put(node.serial, rest[: self._page_bytes], serial, rest)
                break
            offset += len(tokens)
            ghost = self._ghosts.pop((serial, key[offset : offset + self._page_bytes]), None)
        self.recomputed_tokens += offset // ID_BYTES

    def _put(self, above: int, child_key: object, serial: int, tokens: bytes) -> None:
        self._ghosts[above, child_key] = serial, tokens
        self.parents.add(above)
