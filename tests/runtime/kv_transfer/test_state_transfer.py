"""Recurrent states between device and host: they arrive before the first layer of KV, each copy ends once, and one that
fails is no reason for a step to read what did not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from baton.memory_pool.state_pool import StatePool, StateTensor
from baton.memory_pool.stores.host_pool import HostPool
from baton.memory_pool.stores.host_state_pool import HostStatePool
from baton.radix.tiers.host_tier import TierCopy
from baton.runtime.kv_transfer.stream_transfer import StreamTransfers
from baton.runtime.kv_transfer.thread_transfer import ThreadTransfers
from baton.runtime.kv_transfer.transfer import Ended, TransferError, Transfers
from tests.doubles.fake_streams import FakeCuda
from tests.doubles.host_pools import CPU, device_pool

SHAPES = [{"conv": StateTensor((3, 4), torch.float32)}, {"recurrent": StateTensor((5,), torch.bfloat16)}]
NONE = np.empty(0, dtype=np.int32)


class Rig:
    """Notes the parts of copies in the order in which they are made: "state", or the number of a layer."""

    def __init__(self, streams: bool) -> None:
        self.parts: list[object] = []
        self.kv, self.states = device_pool(16), StatePool(3, SHAPES, CPU)
        for layer in self.states.layers:
            for tensor in layer.values():
                tensor[1:] = torch.randn(tensor[1:].shape)
        self.host, self.host_states = HostPool(self.kv, 16), HostStatePool(self.states, 2)
        self.host.load = self._noting(self.host.load, lambda *args: args[2].start)
        self.host_states.load = self._noting(self.host_states.load, lambda *_: "state")
        self.cuda = FakeCuda(0)
        self.transfers: Transfers = (
            StreamTransfers(self.host, CPU, states=self.host_states, cuda=self.cuda)
            if streams
            else ThreadTransfers(self.host, lambda: None, states=self.host_states)
        )

    def _noting(self, call: Callable, part: Callable[..., object]) -> Callable:
        def noted(*args) -> None:
            self.parts.append(part(*args))
            call(*args)

        return noted

    def run(self, *copies: TierCopy) -> list[Ended]:
        self.transfers.order_copies(copies)
        ended: list[Ended] = []
        give_up = time.monotonic() + 60
        while len(ended) < len(copies) and time.monotonic() < give_up:
            self.cuda.run()
            ended += self.transfers.poll()
        return ended

    def state(self, slot: int) -> list[torch.Tensor]:
        return [tensor[slot].clone() for layer in self.states.layers for tensor in layer.values()]


@pytest.fixture(params=[False, True], ids=["thread", "streams"])
def rig(request) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    assert rig.transfers.close(60)


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_states_go_there_and_back(rig: Rig) -> None:
    """With KV, and alone."""
    stored = rig.run(TierCopy(1, True, slots(3, 4), slots(1, 2), 2, 1), TierCopy(2, True, NONE, NONE, 1, 2))
    assert sorted((copy.fence, copy.ok) for copy in stored) == [(1, True), (2, True)]
    before = rig.state(2), rig.state(1)
    loaded = rig.run(TierCopy(3, False, slots(7, 8), slots(1, 2), 3, 1), TierCopy(4, False, NONE, NONE, 2, 2))
    assert sorted((copy.fence, copy.ok) for copy in loaded) == [(3, True), (4, True)]
    for was, slot in zip(before, (3, 2), strict=True):
        assert all(map(torch.equal, was, rig.state(slot)))


def test_states_come_before_the_layers(rig: Rig) -> None:
    rig.run(TierCopy(1, True, slots(3), slots(1), 2, 1))
    rig.run(TierCopy(2, False, slots(7), slots(1), 3, 1))
    assert rig.parts[0] == "state" and [part for part in rig.parts if part != "state"] == [0, 1, 2]


def test_waiting_for_states_is_over_when_they_are_there(rig: Rig) -> None:
    rig.run(TierCopy(1, True, slots(3), slots(1), 2, 1))
    before = rig.state(2)
    rig.transfers.order_copies([TierCopy(2, False, slots(7), slots(1), 3, 1)])
    rig.transfers.wait_states()
    rig.cuda.run()
    assert all(map(torch.equal, before, rig.state(3)))


def test_failed_load_of_a_state_fails_the_steps_that_wait(rig: Rig) -> None:
    ended_early = TierCopy(1, False, slots(7), slots(1), 3, 9)  # there is no such slot on the host
    rig.transfers.order_copies([ended_early, TierCopy(2, False, slots(8), slots(2))])
    with pytest.raises(TransferError, match="and a recurrent state from the host to the device failed"):
        for _ in range(1000):
            rig.transfers.wait_layer(2)
    found = rig.run()
    give_up = time.monotonic() + 60
    while len(found) < 2 and time.monotonic() < give_up:
        rig.cuda.run()
        found += rig.transfers.poll()
    assert sorted((copy.fence, copy.ok) for copy in found) == [(1, False), (2, True)]
    rig.transfers.wait_states()


def test_failed_store_of_a_state_is_reported_once(rig: Rig) -> None:
    (ended,) = rig.run(TierCopy(1, True, slots(3), slots(1), 2, 9))
    assert not ended.ok and rig.transfers.under_way == 0
