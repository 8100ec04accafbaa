"""The pool of recurrent states: its bytes are those that the log promises, and its slots start as zeros that cost
nothing."""

from __future__ import annotations

import math
import resource

import pytest
import torch

from baton.memory_pool.state_pool import StatePool, StateTensor, state_bytes

CPU = torch.device("cpu")
SHAPES = [
    {"conv": StateTensor((3, 20), torch.bfloat16), "recurrent": StateTensor((2, 4, 5), torch.float32)},
    {"conv": StateTensor((2, 7), torch.float32)},
]
BYTES = 3 * 20 * 2 + 2 * 4 * 5 * 4 + 2 * 7 * 4


def test_bytes_are_those_of_all_tensors():
    pool = StatePool(6, SHAPES, CPU)
    assert state_bytes(SHAPES) == pool.bytes_per_state == BYTES
    assert pool.nbytes == 8 * BYTES == sum(tensor.nbytes for layer in pool.layers for tensor in layer.values())


def test_every_slot_starts_as_zeros():
    pool = StatePool(3, SHAPES, CPU)
    assert pool.trash == 4
    assert [{name: (tensor.shape, tensor.dtype) for name, tensor in layer.items()} for layer in pool.layers] == [
        {"conv": ((5, 3, 20), torch.bfloat16), "recurrent": ((5, 2, 4, 5), torch.float32)},
        {"conv": ((5, 2, 7), torch.float32)},
    ]
    assert not any(tensor.any() for layer in pool.layers for tensor in layer.values())


def test_untouched_slots_take_no_memory():
    shape = {"recurrent": StateTensor((256, 1024), torch.float32)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = StatePool(4096, [shape], CPU)  # 4 GiB
    pool.layers[0]["recurrent"][17] = 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB


def test_pool_beyond_all_memory_names_the_flag():
    with pytest.raises(MemoryError, match=r"cannot allocate 1099511627776 states × .*; lower --max-states"):
        StatePool(2**40, [{"recurrent": StateTensor((1024, 1024), torch.float32)}], CPU)
    with pytest.raises(ValueError, match="at least 1"):
        StatePool(0, SHAPES, CPU)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_states_that_are_not_finite_are_found_in_every_layer(value):
    pool = StatePool(4, SHAPES, CPU)
    pool.layers[0]["conv"][1, 2, 19] = value
    pool.layers[1]["conv"][3, 0, 0] = -value
    assert pool.find_not_finite(torch.tensor([4, 3, 2, 1])).tolist() == [False, True, False, True]
