"""KV that passes from request to request counts as used, so that no order of eviction takes it for forgotten."""

from __future__ import annotations

import pytest

from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import Harness


@pytest.mark.parametrize("keep_parent", [False, True])
def test_handoff_counts_as_use_of_its_node(keep_parent: bool) -> None:
    harness = Harness(num_tokens=512)
    harness.add("turn-0", prompt_of(60, 1), 8, retain_ttl=1e6)
    harness.run()
    (before,) = (node for node in harness.cache.tree.nodes() if not node.children)
    used, accessed, turn = before.used, before.last_access, before.turn
    harness.continue_from("turn-0", "next", [7, 8], 8, keep_parent=keep_parent, priority=3)
    harness.run()
    assert before.uses == 1 and before.priority == 3
    assert before.used > used and before.last_access > accessed
    assert {node.turn for node in before.children.values()} == {turn + 1}
    harness.verify()
