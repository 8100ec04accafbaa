"""Copies by the clock: a lane each way, one copy after the other."""

from __future__ import annotations

import numpy as np

from baton.entrypoints.simulate.copies import CopyLanes
from baton.entrypoints.simulate.cost_model import Linear
from baton.radix.tiers.host_tier import TierCopy

COST = Linear(
    fixed_s=1,
    prompt_token_s=0,
    decode_row_s=0,
    context_token_s=0,
    load_token_s=0.5,
    store_token_s=0.25,
    load_state_s=3.0,
    store_state_s=4.0,
)


def copy(fence: int, tokens: int, *, to_host: bool, state: int = 0) -> TierCopy:
    slots = np.arange(tokens, dtype=np.int32)
    return TierCopy(fence, to_host, slots, slots, device_state=state, host_state=state)


def test_copy_lanes_are_ordered_and_independent() -> None:
    lanes = CopyLanes(COST)
    assert lanes.next_end() is None
    lanes.order_copies([copy(1, 4, to_host=False), copy(2, 4, to_host=True), copy(3, 2, to_host=False)], 10.0)
    assert lanes.next_end() == 11.0 and lanes.loads_end == 13.0
    assert lanes.take_ended_copies(10.9) == []
    assert lanes.take_ended_copies(12.0) == [(11.0, 2, 1.0), (12.0, 1, 2.0)]
    lanes.order_copies([copy(4, 4, to_host=True)], 20.0)  # the lane has been free since 11
    assert lanes.take_ended_copies(30.0) == [(13.0, 3, 1.0), (21.0, 4, 1.0)]
    assert lanes.loads_end == 13.0 and lanes.next_end() is None


def test_states_come_before_the_kv_of_all_loads() -> None:
    lanes = CopyLanes(COST)
    loads = [copy(1, 4, to_host=False, state=7), copy(2, 2, to_host=False), copy(3, 0, to_host=False, state=8)]
    lanes.order_copies([*loads, copy(4, 2, to_host=True, state=9)], 10.0)
    assert (lanes.states_end, lanes.loads_end) == (16.0, 19.0)
    assert lanes.take_ended_copies(30.0) == [(14.5, 4, 4.5), (18.0, 1, 5.0), (19.0, 2, 1.0), (19.0, 3, 3.0)]
    lanes.order_copies([copy(5, 2, to_host=False)], 30.0)
    assert (lanes.states_end, lanes.loads_end) == (16.0, 31.0)
