"""Steps of one layer with states: rows of all kinds, for tests of its operations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from baton.memory_pool.state_pool import StatePool, StateTensor
from baton.runtime.layers.states.state_batch import StateBatch, plan_states
from baton.scheduler.batch import StateRows

CPU = torch.device("cpu")


@dataclass
class Row:
    """source: 0 for nothing. cuts: (after so many tokens, slot) of each state that is written."""

    length: int
    source: int
    cuts: list[tuple[int, int]] = field(default_factory=list)


TRASH = 13
SCENES = {
    "one token each": [Row(1, 3, [(1, 3)]), Row(1, 5, [(1, 6)]), Row(1, 0, [(1, 7)]), Row(1, 0, [(1, TRASH)])],
    "prompts": [Row(70, 0, [(70, 1)]), Row(150, 2, [(150, 2)]), Row(64, 4, [(64, 5)])],
    "every cut": [Row(9, 3, [(end, 3 + end) for end in range(1, 10)])],
    "a prompt, a draft and decodes": [
        Row(100, 0, [(1, 1), (2, 2), (66, 3), (100, 4)]),
        Row(3, 5, [(1, 6), (2, 7), (3, 5)]),
        Row(1, 8, [(1, 8)]),
        Row(1, 9, [(1, 10)]),
    ],
    "in place first": [Row(6, 4, [(1, 4), (2, 5), (6, 6)])],
}


def make_step(
    rows: list[Row], shape: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> tuple[StateBatch, dict[str, torch.Tensor], int]:
    """The step, its only layer's states as they were before, and its number of tokens."""
    pool = StatePool(12, [{name: StateTensor(size, dtype) for name, size in shape.items()}], CPU)
    for tensor in pool.layers[0].values():
        tensor[1:].normal_()
    lens = np.array([row.length for row in rows], dtype=np.int32)
    cuts = [(number, end, slot) for number, row in enumerate(rows) for end, slot in row.cuts]
    numbers, ends, slots = (np.array(each, dtype=np.int32) for each in zip(*cuts, strict=True))
    states = StateRows(np.array([row.source for row in rows], dtype=np.int32), numbers, ends, slots)
    before = {name: tensor.clone() for name, tensor in pool.layers[0].items()}
    return plan_states(pool, states, lens), before, int(lens.sum())
