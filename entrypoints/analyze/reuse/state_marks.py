"""Where pools of recurrent states of several sizes have states, on the paths of the log's tree.

What is counted is what the server's tree counts (radix/node_states.py): the states that a node carries, and how many of
its children have states at or below them.
"""

from __future__ import annotations

from collections.abc import Iterator

from .tree_node import Node, StateMarks


def marks_of(node: Node) -> StateMarks:
    """The marks of a node, which has some from now on."""
    if node.states is None:
        node.states = StateMarks()
    return node.states


def count_above(node: Node, sizes: int, change: int) -> Iterator[tuple[Node, int]]:
    """The subtree of a node has got its first state at these sizes (1), or lost the last (-1): count it above. Yields
    the nodes with a state, and the sizes, at which several continue from now on."""
    above = node.parent
    while sizes and above is not None and above.parent is not None:
        marks = marks_of(above)
        had, many = marks.any, marks.many
        marks.count_child(sizes, change)
        if grown := marks.many & ~many & marks.carried:
            yield above, grown
        sizes &= ~(had if change > 0 else marks.any)
        above = above.parent


def forget_marks(node: Node) -> None:
    """A node is about to leave the tree, with its states."""
    if node.states is not None:
        for _ in count_above(node, node.states.any, -1):
            pass
        node.states = None


def holders(node: Node | None, sizes: int) -> Iterator[tuple[int, Node | None]]:
    """For each of these sizes the deepest node that carries a state, from this one up: (sizes, node). None: there is no
    other than the beginning, which needs none."""
    while sizes and node is not None and node.parent is not None:
        if node.states is not None and (found := node.states.carried & sizes):
            yield found, node
            sizes &= ~found
        node = node.parent
    if sizes:
        yield sizes, None
