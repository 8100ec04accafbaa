"""Which nodes are of use to a prompt: those at whose end, or further down the path, a sequence can begin.

Where every layer attends to everything, that is each node. A model with recurrent states begins where a state was kept,
on any tier; one with a pool for sliding windows where the window before that place is whole. The KV below the last such
end of a path is of no use.

    node:       a ──┬── b ────── c          states: at the end of b
                    └── d                   of use: a and b

It is enough to look at the ends of nodes: the tokens of a node lose their slots from the first on, so if a window is
whole before a place inside a node, it is whole before the node's end too. So a split changes nothing: the upper part is
of use if the lower is.

Changes are collected, and `settle` looks at them once a turn: a state that moves along a path changes nothing below the
place where it was. With states this costs what the changed nodes cost; with windows, also the nodes that lie within a
window below them.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from .cache import RadixCache
from .node import TreeNode
from .node_windows import NodeWindows


class UsableEnds:
    """Owns `TreeNode.has_ends`, which is false until `settle` finds otherwise. Watches a cache from its start."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._changed = set[TreeNode]()
        for part in (cache.states, cache.windows):
            if part is not None:
                part.changed = self._changed

    def note(self, node: TreeNode) -> None:
        """A node is new, or what is below it is not what it was."""
        self._changed.add(node)

    def forget_nodes(self) -> None:
        """The tree is dropped with all its nodes."""
        self._changed.clear()

    def settle(self) -> tuple[list[TreeNode], list[TreeNode]]:
        """Set ``has_ends`` anew where it may have changed. Returns (nodes that are of no use any more, children before
        parents; nodes that are of use now, parents before children)."""
        if not self._changed:
            return [], []
        windows = self._cache.windows
        listed = set(self._changed if windows is None else _within_reach(windows, self._changed))
        self._changed.clear()
        todo = [(-node.prefix_len, node.serial, node) for node in listed]
        heapify(todo)  # the deepest first: a node follows those below it
        lost, gained = list[TreeNode](), list[TreeNode]()
        while todo:
            _, _, node = heappop(todo)
            parent = node.parent
            if parent is None or node.has_ends == (has_ends := self._has_ends(node)):
                continue  # the root, or it has left the tree; or all is as it was
            node.has_ends = has_ends
            (gained if has_ends else lost).append(node)
            if parent not in listed:
                listed.add(parent)
                heappush(todo, (-parent.prefix_len, parent.serial, parent))
        return lost, gained[::-1]

    def _has_ends(self, node: TreeNode) -> bool:
        """What ``has_ends`` is to be, if it is right for the children."""
        tree, windows = self._cache.tree, self._cache.windows
        if windows is None:
            return node.has_states
        if windows.usable(node, node.prefix_len) == node.prefix_len:
            return True
        return any(child.has_ends and not tree.is_hidden(child) for child in node.children.values())


def _within_reach(windows: NodeWindows, changed: Iterable[TreeNode]) -> set[TreeNode]:
    """Nodes whose window has changed, and those whose ends see into them; also the upper parts that splits have made
    of them since."""
    above, below = set[TreeNode](), set[TreeNode]()
    nodes = sorted(changed, key=lambda node: node.prefix_len, reverse=True)  # the deepest have the furthest reach
    for node in nodes:
        upper = node.parent
        while upper is not None and upper.window_len and upper not in above:
            above.add(upper)
            upper = upper.parent
        todo = list(node.children.values())
        while todo:
            child = todo.pop()
            if windows.pages.first_needed(child.prefix_len) < node.prefix_len and child not in below:
                below.add(child)
                todo.extend(child.children.values())
    return above | below | set(nodes)
