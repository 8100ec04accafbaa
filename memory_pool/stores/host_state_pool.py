"""Recurrent states that left the device, in host memory.

    memory: uint8 [num_states + 1, bytes of a state]        the tensors of layer 0, of layer 1, …; slot 0 is not used

A state of all layers is one contiguous piece. The device's pool has it in as many places as its layers have tensors,
each of them contiguous. Numbers of slots are those of `StateSlots`, on both sides; which state is whose is known
elsewhere.

To a disk or over a wire it goes as a *snapshot*, with the KV of the tokens behind the last whole block of its sequence:

    state | pages of KV, in order | zeros, up to the size of all snapshots
"""

from __future__ import annotations

import numpy as np
import torch

from ..kv_pool import untouched_zeros
from ..state_pool import StatePool
from .host_pool import pin_memory


class HostStatePool:
    """Host memory for num_states states of a device pool. Raises MemoryError where the host cannot hold it.

    pin: as for `HostPool`. `store` and `load` hold no state between calls: any threads may run them at the same time,
    as long as no slot of one call is written by another. On a GPU they queue on the current stream.
    """

    def __init__(self, device_pool: StatePool, num_states: int, *, pin: bool | None = None) -> None:
        if num_states < 1:
            raise ValueError(f"num_states must be at least 1, not {num_states}")
        self.num_states = num_states
        self.bytes_per_state = device_pool.bytes_per_state
        self.num_layers = device_pool.num_layers
        self.pinned = device_pool.device.type == "cuda" if pin is None else pin
        layers = [list(layer.values()) for layer in device_pool.layers]
        self._layers = [[tensor.view(len(tensor), -1).view(torch.uint8) for tensor in layer] for layer in layers]
        """The tensors of each layer, uint8 [slots on the device, bytes]."""
        sizes = [sum(tensor.shape[1] for tensor in layer) for layer in self._layers]
        self._starts = np.cumsum([0, *sizes]).tolist()
        """Where each layer begins in a state."""
        dtypes = [tensor.dtype for layer in device_pool.layers for tensor in layer.values()]
        ends = np.cumsum([tensor.shape[1] for layer in self._layers for tensor in layer]).tolist()
        self.tensors = [(slice(start, end), dtype) for start, end, dtype in zip([0, *ends], ends, dtypes)]
        """Where each tensor is in a state, in bytes, and its numbers."""
        named = [(name, tuple(tensor.shape[1:])) for layer in device_pool.layers for name, tensor in layer.items()]
        self.layout = " ".join(f"{name} {shape} {dtype}" for (name, shape), dtype in zip(named, dtypes))
        """What the bytes of a state mean, for fingerprints."""
        try:
            shape = (num_states + 1, self.bytes_per_state)
            self.memory = untouched_zeros(shape, torch.uint8, torch.device("cpu"))
            if self.pinned:
                pin_memory(self, self.memory)
        except (MemoryError, ValueError) as error:  # ValueError: more than there are addresses
            raise MemoryError(f"cannot allocate the {self.describe()}; ask for fewer") from error

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, the one that is not used included."""
        return (self.num_states + 1) * self.bytes_per_state

    def describe(self) -> str:
        """For the start-up log: states x bytes per state = size."""
        size = self.num_states * self.bytes_per_state / 2**30
        kind = " (pinned)" if self.pinned else ""
        return f"host states: {self.num_states} states × {self.bytes_per_state} bytes = {size:.2f} GiB{kind}"

    @property
    def states_view(self) -> np.ndarray:
        """uint8 [num_states + 1, bytes of a state]: the pool's memory itself, to be read and written."""
        return self.memory.numpy()

    @torch.inference_mode()  # the pools may have been made in it; torch then writes to them in no other
    def store(self, device_slot: int, host_slot: int, layer: int | None = None) -> None:
        """Copy a state to the host, or one layer of it."""
        for on_device, on_host in self._pieces(device_slot, host_slot, layer):
            on_host.copy_(on_device, non_blocking=True)

    @torch.inference_mode()
    def load(self, host_slot: int, device_slot: int) -> None:
        """Copy a state to the device."""
        for on_device, on_host in self._pieces(device_slot, host_slot, None):
            on_device.copy_(on_host, non_blocking=True)

    def _pieces(self, device_slot: int, host_slot: int, layer: int | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where the tensors of a state are, or those of one layer: uint8 [bytes] on the device, and on the host."""
        if not 0 < host_slot <= self.num_states:
            raise ValueError(f"host state {host_slot} is not one of 1 … {self.num_states}")
        if device_slot < 1:
            raise ValueError(f"the state in slot {device_slot} of the device is not one that is handed out")
        pieces = []
        for number in range(self.num_layers) if layer is None else (layer,):
            start = self._starts[number]
            for tensor in self._layers[number]:
                end = start + tensor.shape[1]
                pieces.append((tensor[device_slot], self.memory[host_slot, start:end]))
                start = end
        return pieces


class SnapshotPages:
    """Reads and writes snapshots, for one thread at a time; `numbers` may be called by any.

    states: uint8 [num_states + 1, bytes of a state] (`HostStatePool.states_view`). pages: as for `BlockPages`.
    most_pages: that a snapshot has room for.
    """

    def __init__(self, states: np.ndarray, pages: np.ndarray, most_pages: int) -> None:
        self.state_bytes = states.shape[1]
        self.block_bytes = self.state_bytes + most_pages * pages.shape[1]
        self._states = states
        self._pages = pages
        self._most_pages = most_pages
        self._scratch: np.ndarray | None = None

    def numbers(self, state: int, pages: np.ndarray) -> np.ndarray:
        """int64 [1 + pages]: the slot of the state, and a copy of the numbers of the pages."""
        if not 0 < state < len(self._states):
            raise ValueError(f"state {state} is not one of 1 … {len(self._states) - 1}")
        if len(pages) > self._most_pages:
            raise ValueError(f"a snapshot has room for {self._most_pages} pages, not {len(pages)}")
        if len(pages) and not 0 < pages.min() <= pages.max() < len(self._pages):
            wrong = pages[(pages < 1) | (pages >= len(self._pages))][0]
            raise ValueError(f"page {wrong} is not one of 1 … {len(self._pages) - 1}")
        return np.concatenate([[state], pages]).astype(np.int64)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        """uint8 [block_bytes]: the snapshot of this state and these pages. It stays until the next call."""
        room, end = self.room(numbers), self._snapshot_bytes(numbers)
        room[: self.state_bytes] = self._states[numbers[0]]
        if len(numbers) > 1:
            tail = room[self.state_bytes : end].reshape(len(numbers) - 1, -1)
            np.take(self._pages, numbers[1:], axis=0, out=tail, mode="clip")  # clip: unbuffered
        room[end:] = 0
        return room

    def room(self, numbers: np.ndarray) -> np.ndarray:
        """uint8 [block_bytes], where a snapshot can be put together."""
        scratch = self._scratch
        if scratch is None:
            scratch = self._scratch = np.empty(self.block_bytes, np.uint8)
        return scratch

    def scatter(self, numbers: np.ndarray) -> None:
        """Put the snapshot that is in ``room(numbers)`` into its state and pages."""
        room = self.room(numbers)
        self._states[numbers[0]] = room[: self.state_bytes]
        if len(numbers) > 1:
            tail = room[self.state_bytes : self._snapshot_bytes(numbers)]
            self._pages[numbers[1:]] = tail.reshape(len(numbers) - 1, -1)

    def _snapshot_bytes(self, numbers: np.ndarray) -> int:
        return self.state_bytes + (len(numbers) - 1) * self._pages.shape[1]
