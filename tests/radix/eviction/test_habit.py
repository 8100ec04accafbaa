from __future__ import annotations

import numpy as np
import pytest

from baton.radix.eviction.habit import HEAD_TOKENS, Habit, got_child, habit_of, lost_child, used_again
from baton.radix.node import TreeNode
from baton.radix.tree import RadixTree

SESSION = np.arange(40, dtype=np.int32)


def child_of(parent: TreeNode, ids: np.ndarray) -> TreeNode:
    return TreeNode(7, parent, None, ids.tobytes(), ids, 1)


@pytest.mark.parametrize(
    ("later", "shared"),
    [
        (SESSION, False),
        (SESSION[:5], False),
        (np.append(SESSION[: HEAD_TOKENS + 1], np.int32(99)), False),
        (np.append(SESSION[: HEAD_TOKENS - 1], np.int32(99)), True),
        (SESSION + 1, True),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_shared_is_what_is_gone_on_from_in_another_way(later: np.ndarray, shared: bool, swapped: bool) -> None:
    first, second = (later, SESSION) if swapped else (SESSION, later)
    parent = RadixTree(1).root
    got_child(parent, child_of(parent, first))
    assert not habit_of(parent).shared, "the first one says nothing"
    lost_child(parent, child_of(parent, first))
    got_child(parent, child_of(parent, second))
    assert habit_of(parent).shared is shared
    lost_child(parent, child_of(parent, second))
    got_child(parent, child_of(parent, second))
    assert habit_of(parent).shared is shared, "once is enough"


def test_the_last_gap_counts_half() -> None:
    habit = used_again(Habit(), 4)
    assert habit.gap == 4.0
    habit = used_again(habit._replace(shared=True, child=b"abcd"), 16)
    assert habit == Habit(6.0, True, b"abcd")
