"""The learned order's record of a node: how often it is used, and whether several sessions share it."""

from __future__ import annotations

from typing import NamedTuple

from ..node import ID_BYTES, TreeNode
from .reuse import bucket_of

HEAD_TOKENS = 16
"""A node is recognised by its parent and by this many first tokens, more than most texts share by chance."""


class Habit(NamedTuple):
    """Never changed, only replaced: when a node is split, both parts have it."""

    gap: float | None = None
    """The mean of its last gaps, in buckets of idle time (reuse.py), the last one counting half; None before the first
    reuse."""
    shared: bool = False
    """Several sessions continued from it, though never two at the same time: the tree itself would show that."""
    child: bytes | None = None
    """The head of the child that it had last."""


UNKNOWN = Habit()


def habit_of(node: TreeNode) -> Habit:
    note = node.note
    return note if isinstance(note, Habit) else UNKNOWN


def head_of(node: TreeNode) -> bytes:
    return node.key[: HEAD_TOKENS * ID_BYTES]


def used_again(habit: Habit, gap: int) -> Habit:
    """After a reuse, ``gap`` ticks after the one before."""
    bucket = bucket_of(gap)
    return Habit(bucket if habit.gap is None else (habit.gap + bucket) / 2, habit.shared, habit.child)


def lost_child(parent: TreeNode, child: TreeNode) -> None:
    """Note that a node has lost its only child."""
    gap, shared, _ = habit_of(parent)
    parent.note = Habit(gap, shared, head_of(child))


def got_child(parent: TreeNode, child: TreeNode) -> None:
    """Note a new only child. If it differs from the last one, several sessions share the parent. If it is the same, or
    a beginning of it (nodes are evicted from their ends), one session has come back."""
    gap, shared, last = habit_of(parent)
    if not shared and last is not None:
        head = head_of(child)
        if not (head.startswith(last) or last.startswith(head)):
            parent.note = Habit(gap, True, last)
