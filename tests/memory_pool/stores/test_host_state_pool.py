"""The host's pool of recurrent states: bytes go there and back, and nothing beside them changes."""

from __future__ import annotations

import pytest
import torch

from baton.memory_pool.state_pool import StatePool, StateTensor
from baton.memory_pool.stores.host_state_pool import HostStatePool

SHAPES = [
    {"conv": StateTensor((3, 5), torch.bfloat16), "recurrent": StateTensor((2, 4, 3), torch.float32)},
    {"conv": StateTensor((2, 7), torch.float32)},
]


def filled() -> StatePool:
    pool = StatePool(4, SHAPES, torch.device("cpu"))
    for layer in pool.layers:
        for tensor in layer.values():
            tensor[1:] = torch.randn(tensor[1:].shape)
    return pool


def states_of(pool: StatePool) -> list[torch.Tensor]:
    return [tensor.clone() for layer in pool.layers for tensor in layer.values()]


def test_states_return_as_they_were() -> None:
    device = filled()
    before = states_of(device)
    host = HostStatePool(device, 3)
    host.store(2, 3)
    for layer in range(host.num_layers):
        host.store(4, 1, layer)
    assert not host.memory[[0, 2]].any()
    host.load(3, 1)
    host.load(1, 3)
    for was, tensor in zip(before, states_of(device), strict=True):
        assert torch.equal(tensor[[0, 1, 2, 3, 4, 5]], was[[0, 2, 2, 4, 4, 5]])


def test_bytes_are_those_of_every_tensor() -> None:
    host = HostStatePool(filled(), 3)
    assert host.bytes_per_state == 30 + 96 + 56 and host.nbytes == 4 * 182
    assert host.describe() == "host states: 3 states × 182 bytes = 0.00 GiB"


@pytest.mark.parametrize(("device_slot", "host_slot"), [(1, 0), (1, 4), (0, 1)])
def test_slots_that_are_not_handed_out_are_refused(device_slot: int, host_slot: int) -> None:
    host = HostStatePool(filled(), 3)
    with pytest.raises(ValueError, match="not one"):
        host.store(device_slot, host_slot)
    with pytest.raises(ValueError, match="not one"):
        host.load(host_slot, device_slot)


def test_pool_without_states_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        HostStatePool(filled(), 0)
