"""Copies between the host and the device that nobody waits for.

A GPU works behind the host: a step is launched while the one before it runs. One blocking copy ends that, since it
waits for all that was launched before. So whatever a step needs goes to the device by `upload`, and what it computed
comes back by `to_host`; nothing else on the way of a step may copy, nor read a device value on the host (`.item()`,
`bool(t)`, `.cpu()`, `nonzero`, boolean masks as indices). On a CPU the same code runs, without the copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

_FLOATS = {4: torch.float32, 8: torch.float64}
"""By bytes; these arrive as they are, integers arrive as int64."""


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays -> tensors of their shapes on the device, in one copy: integers as int64, float32 and float64 unchanged.
    The arrays may change at once: they are copied here. Raises TypeError for other types.

    On a GPU the copy starts from pinned memory and does not block: torch's pinned allocator hands the buffer out again
    only after the copy has been done.
    """
    if not arrays:
        return []
    words = [_words(array) for array in arrays]
    lengths = [len(part) for part in words]
    packed = torch.empty(sum(lengths), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(words, out=packed.numpy())
    if device.type == "cuda":
        packed = packed.to(device, non_blocking=True)
    return [_unpack(part, array) for part, array in zip(packed.split(lengths), arrays)]


def _words(array: np.ndarray) -> np.ndarray:
    """What an array is in the packed copy: integers, or words of 8 bytes."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    flat = array if array.ndim == 1 else array.reshape(-1)
    if kind in "ib" or (kind == "u" and size < 8):
        return flat
    if kind != "f" or size not in _FLOATS:
        raise TypeError(f"{array.dtype} cannot be uploaded; integers up to int64, float32 and float64 can")
    padded = np.zeros(-(-array.nbytes // 8) * 8 // size, dtype=array.dtype)
    padded[: array.size] = flat
    return padded.view(np.int64)


def _unpack(words: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    if array.dtype.kind == "f":
        words = words.view(_FLOATS[array.dtype.itemsize])[: array.size]
    return words if array.ndim == 1 else words.view(array.shape)


class HostCopy:
    """Tensors on their way to the host."""

    def __init__(self, packed: torch.Tensor, likes: list[tuple[np.dtype, torch.Size]], copied: torch.cuda.Event | None):
        self._packed = packed
        self._likes = likes
        self._copied = copied

    def wait(self) -> list[np.ndarray]:
        """The tensors as arrays, when they are here."""
        if self._copied is not None:
            self._copied.synchronize()
        host, start, arrays = self._packed.numpy(), 0, []
        if self._copied is not None:
            host = host.copy()  # pinned memory goes back at once, however long somebody keeps an array
        for dtype, shape in self._likes:
            stop = start + math.prod(shape) * dtype.itemsize // 4
            arrays.append(host[start:stop].view(dtype).reshape(shape))
            start = stop
        return arrays


_NUMPY = {torch.int32: np.dtype(np.int32), torch.int64: np.dtype(np.int64), torch.float32: np.dtype(np.float32)}


def to_host(tensors: Sequence[torch.Tensor]) -> HostCopy:
    """Begin to copy contiguous int32, int64 and float32 tensors of one device to the host: one copy, one event. int64
    goes first, so that it is aligned.

    They must not be written until it is waited for, where the device is a CPU not even then.
    """
    likes = [(_NUMPY[t.dtype], t.shape) for t in tensors]
    parts = [t.reshape(-1).view(torch.int32) for t in tensors]
    packed = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else torch.empty(0, dtype=torch.int32)
    if packed.device.type != "cuda":
        return HostCopy(packed, likes, None)
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return HostCopy(host, likes, copied)
