"""A bounded history of the cache: the prefixes that it had, and how each of their tokens left it.

It has the structure of a tree, and no slots. A `PastNode` is a run of tokens with one fate; paths share what they have
in common, token by token, whatever the page size. `RadixCache` reports changes through its watchers:

    stored ──▶ live, once for each node of the cache's tree that holds the token ──removed──▶ departed ──▶ forgotten
                 ▲                                                                                │
                 └──────────────────────────────── stored again ──────────────────────────────────┘

A token is live while the cache's tree has it, on any tier. With pages of several tokens two nodes may begin alike, so
the count may exceed 1. A path never departs before what follows it; so the departed, oldest first, are leaves first.

Why a token left follows from two things: what removed it, and how the last sequence that held it had ended. So
KV that only a lease kept is `EXPIRED` if that lease ran out and the KV was evicted then; KV that a request used once
more after that is `EVICTED`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .cache import RadixCache
from .kv_sequence import NUM_ENDS
from .node import ID_BYTES, TreeNode
from .past_node import NO_CHILDREN, Departure, PastNode, Pressure
from .tree import common_prefix

NODE_TOKENS = 64
"""A departed node counts as so many tokens more: it takes memory even if it holds only one."""

MAX_NAMESPACES = 16
"""Namespaces that are remembered of a client, the latest ones."""

MAX_CLIENTS = 4096
"""Clients whose namespaces are remembered."""

MAX_JOINED = 4096
"""Tokens of the longest node that is made of two: to join them, their ids are copied."""

_EVICTED = Departure.EVICTED, Departure.EXPIRED, Departure.RELEASED
"""By the `SequenceEnd` of the last sequence that held the tokens."""


class CacheHistory:
    """Watches a cache from its start. Bounded: what departed counts up to ``max_tokens``, the oldest is forgotten
    first; what is live is bounded by the cache. Its methods must not raise: the cache calls them in the middle of a
    change."""

    def __init__(self, cache: RadixCache, max_tokens: int) -> None:
        self._cache = cache
        self.max_tokens = max_tokens
        self.departed_tokens = 0
        """Tokens of departed nodes, plus `NODE_TOKENS` for each node."""
        self.pressure: Pressure | None = None
        """The request that memory is being found for now. Set by the component that evicts."""
        self.now = 0.0
        """The time of all later events, in seconds. Set by the scheduler."""
        self._roots: dict[str, PastNode] = {}
        self._departed: dict[PastNode, None] = {}
        """Oldest first. A dict, because a node leaves it when it is stored again."""
        self._tails: dict[TreeNode, tuple[str, bytes, str]] = {}
        """Tails that `_add_tails` has yet to add: (namespace, ids, client), by the node that they follow."""
        self._namespaces: dict[str, dict[str, None]] = {}
        """The namespaces of each client, the latest last; likewise the clients."""
        if max_tokens:
            cache.watchers.add_watcher(self)
            cache.watchers.add_tier_watcher(self)
            cache.watchers.add_sequence_watcher(self)

    # -- as a watcher -------------------------------------------------------------------------------------------------

    def node_stored(self, node: TreeNode) -> None:
        if node.past is None:  # otherwise it had only left the device
            self._store(node)

    def path_used(self, node: TreeNode, tick: int) -> None:
        pass

    def nodes_removed(self, nodes: Sequence[TreeNode]) -> None:
        self._add_tails()
        pressure = self.pressure
        for node in nodes:
            if node.past is not None and node.host is None:
                end = node.last_end if node.last_end > node.retired_end else node.retired_end
                self._remove(node, _EVICTED[end % NUM_ENDS], pressure)
        self._forget_oldest()

    def copy_made(self, node: TreeNode) -> None:
        if node.past is None and not node.on_device:
            self._store(node)

    def copy_removed(self, node: TreeNode) -> None:
        if node.past is not None and not node.on_device:
            self._add_tails()
            self._remove(node, Departure.DROPPED, self.pressure)
            self._forget_oldest()

    def nodes_hidden(self, nodes: Sequence[TreeNode]) -> None:
        self._add_tails()
        for node in nodes:
            if node.past is not None:
                self._remove(node, Departure.CLEARED, None)
        self._forget_oldest()

    def cache_cleared(self) -> None:
        self._add_tails()
        for root in self._roots.values():
            order = list(root.children.values())
            for node in order:  # grows: parents before their children
                order.extend(node.children.values())
            for node in reversed(order):
                if node.live:
                    self._depart(node, Departure.CLEARED, None)
        self._forget_oldest()

    def tail_computed(self, node: TreeNode, namespace: str, ids: bytes, client: str) -> None:
        """Only noted here: it has no effect before the next look-up or departure, and by then it may have grown."""
        if node.past is None and node is not self._cache.tree.root:
            return  # it is hidden
        above, tail = node.parent, (namespace, ids, client)
        if node in self._tails:
            if not _continues(self._tails[node], tail, ids):
                self._add_tails()
            self._tails.pop(node, None)
        elif above in self._tails and _continues(self._tails[above], tail, node.key + ids):
            del self._tails[above]
        self._tails[node] = tail

    def _add_tails(self) -> None:
        if not self._tails:
            return
        tails, self._tails = self._tails, {}
        for node, (namespace, ids, client) in tails.items():
            # the nodes are still in the tree, or were until now; of them the root alone has no past
            top = self._root_of(namespace) if node.past is None else self._cut(node.past, node.prefix_len)
            for part in reversed(self._join_path(top, ids, client)):
                if not part.live:
                    self._depart(part, Departure.PAGE, None)
        self._forget_oldest()

    # -- look-ups -----------------------------------------------------------------------------------------------------

    def trace_prompt(
        self, node: TreeNode, namespace: str, token_ids: np.ndarray, start: int
    ) -> list[tuple[int, PastNode]]:
        """The fates of the tokens from position ``start`` on, in order, up to the first that is not known: numbers of
        consecutive tokens, each with their node, which must not be changed.

        node: where a known beginning of the prompt ends in the cache's tree, at or before ``start``. token_ids: int32
        [n], the whole prompt.
        """
        self._add_tails()
        above, position = node.past, node.prefix_len
        if above is None:
            above, position = self._roots.get(namespace), 0
        if above is None:
            return []
        while above.start >= position > 0:
            assert above.parent is not None
            above = above.parent
        found: list[tuple[int, PastNode]] = []
        for tokens, past in _follow(above, position, token_ids):
            position += tokens
            if position > start:
                found.append((min(tokens, position - start), past))
        return found

    def find_elsewhere(self, client: str, namespace: str, token_ids: np.ndarray, start: int) -> int:
        """The number of tokens from position ``start`` on that this client has computed after the same beginning in
        another of its namespaces: the longest such run. A client that is not known ("") has none.

        token_ids: int32 [n], the whole prompt.
        """
        if not client:
            return 0
        self._add_tails()
        own = self._namespaces.pop(client, {})
        self._namespaces[client] = own  # the latest
        own.pop(namespace, None)
        own[namespace] = None
        if len(own) > MAX_NAMESPACES:
            del own[next(iter(own))]
        if len(self._namespaces) > MAX_CLIENTS:
            del self._namespaces[next(iter(self._namespaces))]
        if len(own) == 1:
            return 0
        longest = 0
        for other in own:
            root = self._roots.get(other) if other != namespace else None
            if root is None:
                continue
            position, run = 0, 0
            for tokens, past in _follow(root, 0, token_ids):
                position += tokens
                if position > start:
                    if past.client != client:
                        break
                    run += min(tokens, position - start)
            longest = max(longest, run)
        return longest

    # -- the tree -----------------------------------------------------------------------------------------------------

    def _root_of(self, namespace: str) -> PastNode:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = PastNode(None, 0, 0, b"")
        return root

    def _cut(self, past: PastNode, end: int) -> PastNode:
        """The node that ends at this position, on the path down to ``past``. Splits a longer one."""
        while past.start >= end:
            assert past.parent is not None
            past = past.parent
        return past if past.end == end else self._split(past, end)

    def _split(self, past: PastNode, position: int) -> PastNode:
        """Cut a node at a position; returns the new upper part."""
        parent = past.parent
        assert parent is not None
        cut = (position - past.start) * ID_BYTES
        upper = PastNode(parent, past.start, position, past.key[:cut])
        upper.live, upper.departure, upper.left_at = past.live, past.departure, past.left_at
        upper.pressure, upper.client = past.pressure, past.client
        parent.children[past.key[:ID_BYTES]] = upper
        past.key, past.start, past.parent = past.key[cut:], position, upper
        upper.children = {past.key[:ID_BYTES]: past}
        if not past.live:
            self._departed[upper] = None  # behind the lower part, which is to be forgotten first
            self.departed_tokens += NODE_TOKENS
        return upper

    def _join_path(self, past: PastNode, key: bytes, client: str) -> list[PastNode]:
        """The nodes of ``key`` below a node; those that are missing are made. Each that was not live has no fate now,
        for the caller to give it one, and this client; of such neighbours without other branches one is made."""
        path: list[PastNode] = []
        offset, size, is_new = 0, len(key), False
        while offset < size:
            first = key[offset : offset + ID_BYTES]
            child = past.children.get(first)
            if child is None:
                rest = key[offset:] if offset else key
                end = past.end + len(rest) // ID_BYTES
                if is_new and not past.children and end - past.start <= MAX_JOINED:
                    past.key, past.end = past.key + rest, end
                    return path
                child = PastNode(past, past.end, end, rest)
                child.client = client
                _add_child(past, child)
                path.append(child)
                return path
            if not key.startswith(child.key, offset):
                common = common_prefix(key, offset, child.key)
                child = self._split(child, child.start + common // ID_BYTES)
            offset += len(child.key)
            if child.live:
                path.append(child)
            else:
                self._rejoin(child)
                child.client = client
                if is_new and len(past.children) == 1 and child.end - past.start <= MAX_JOINED:
                    _join_child(past, child)
                    path[-1] = child
                else:
                    path.append(child)
                is_new = True
            past = child
        return path

    def _store(self, node: TreeNode) -> None:
        """A node of the cache's tree counts from now on."""
        above = node.parent
        if above is None:
            return
        if above.past is not None:
            top = self._cut(above.past, above.prefix_len)
        elif above is self._cache.tree.root:
            assert isinstance(node.child_key, tuple)
            top = self._root_of(node.child_key[0])
        else:
            return  # it is hidden
        past = top
        for past in self._join_path(top, node.key, node.client):
            past.live += 1
        node.past = past

    def _remove(self, node: TreeNode, departure: Departure, pressure: Pressure | None) -> None:
        """A node of the cache's tree counts no more."""
        assert node.past is not None
        past, start = self._cut(node.past, node.prefix_len), node.prefix_len - len(node)
        node.past = None
        while True:
            if past.start < start:
                self._split(past, start)
            parent = past.parent
            assert parent is not None
            past.live -= 1
            if not past.live:
                lower = self._child_of_fate(past, departure, pressure)
                if lower is None:
                    self._depart(past, departure, pressure)
                else:  # it has its place among the departed, right before that of ``past``
                    self.departed_tokens += past.end - past.start
                    _join_child(past, lower)
                    past = lower
            if past.start <= start:
                return
            past = parent

    def _child_of_fate(self, past: PastNode, departure: Departure, pressure: Pressure | None) -> PastNode | None:
        """The only child of a node that departs now, if it has departed in the same way at the same time."""
        if len(past.children) != 1:
            return None
        child = next(iter(past.children.values()))
        alike = child.departure is departure and child.left_at == self.now and child.pressure is pressure
        return child if alike and child.client == past.client and child.end - past.start <= MAX_JOINED else None

    def _depart(self, past: PastNode, departure: Departure, pressure: Pressure | None) -> None:
        past.live = 0
        past.departure, past.left_at, past.pressure = departure, self.now, pressure
        self._departed[past] = None
        self.departed_tokens += past.end - past.start + NODE_TOKENS

    def _rejoin(self, past: PastNode) -> None:
        """Take a node off the departed."""
        del self._departed[past]
        self.departed_tokens -= past.end - past.start + NODE_TOKENS
        past.departure = past.pressure = None

    def _forget_oldest(self) -> None:
        """Forget the oldest of the departed until the rest is within the bound."""
        while self.departed_tokens > self.max_tokens:
            oldest = next(iter(self._departed))
            del self._departed[oldest]
            self.departed_tokens -= oldest.end - oldest.start + NODE_TOKENS
            parent = oldest.parent
            assert parent is not None
            first = oldest.key[:ID_BYTES]
            if parent.children.get(first) is oldest:
                del parent.children[first]
            oldest.key = b""  # a node further up in the cache's tree may still refer to it
            if parent.parent is None and not parent.children:
                self._forget_root(parent)

    def _forget_root(self, root: PastNode) -> None:
        for namespace, other in self._roots.items():
            if other is root:
                del self._roots[namespace]
                return


def _continues(old: tuple[str, bytes, str], tail: tuple[str, bytes, str], ids: bytes) -> bool:
    """Does a tail begin with another, of the same client? ids: those of the new one from where the old one begins."""
    return tail[0] == old[0] and tail[2] == old[2] and ids.startswith(old[1])


def _add_child(past: PastNode, child: PastNode) -> None:
    """Hang a new node below another."""
    if past.children is NO_CHILDREN:
        past.children = {}
    past.children[child.key[:ID_BYTES]] = child


def _join_child(past: PastNode, child: PastNode) -> None:
    """Have the only child of a node take its place, with the tokens of both. The node leaves the tree. A node of the
    cache's tree that still refers to it has a path that ends further up, and finds that above it."""
    parent = past.parent
    assert parent is not None
    child.key, child.start, child.parent = past.key + child.key, past.start, parent
    parent.children[past.key[:ID_BYTES]] = child


def _follow(past: PastNode, position: int, token_ids: np.ndarray) -> Iterator[tuple[int, PastNode]]:
    """Yield (tokens, node) along a prompt from this position on, which is in ``past`` or at its end, as far as it is
    known. The last node may match in part."""
    rest = token_ids[position:].tobytes()
    offset = 0
    if position < past.end:
        key = past.key[(position - past.start) * ID_BYTES :]
        offset = len(key) if rest.startswith(key) else common_prefix(rest, 0, key)
        if offset:
            yield offset // ID_BYTES, past
        if offset < len(key):
            return
    while (child := past.children.get(rest[offset : offset + ID_BYTES])) is not None:
        whole = rest.startswith(child.key, offset)
        matched = len(child.key) if whole else common_prefix(rest, offset, child.key)
        yield matched // ID_BYTES, child
        if not whole:
            return
        offset += matched
        past = child
