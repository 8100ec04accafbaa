"""Copies between host and device that do not block.

The GPU runs behind the host: a step is launched while the previous one still runs. A single blocking copy would end
that, since it waits for everything launched before it. So `upload` brings a step's data to the device, and `to_host`
brings its results back. Nothing else in a step may copy, or read a device value on the host (`.item()`, `bool(t)`,
`.cpu()`, `nonzero`, boolean masks as indices). On a CPU the same code runs, without the copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_FLOATS = {4: torch.float32, 8: torch.float64}
"""Float types by size in bytes; they arrive unchanged, while integers arrive as int64."""
_CANNOT = "cannot be uploaded; integers up to int64, float32 and float64 can"


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays -> device tensors of the same shapes, in one copy: integers as int64, float32 and float64 unchanged.
    The caller may change the arrays afterwards. Raises TypeError for other types.

    On a GPU the copy starts from pinned memory and does not block: torch's pinned allocator hands the buffer out again
    only after the copy is done.
    """
    if device.type == "cpu":
        return [_copied(array) for array in arrays]
    if not arrays:
        return []
    return unpack_arrays(pack_arrays(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def pack_arrays(arrays: Sequence[np.ndarray], *, pinned: bool) -> torch.Tensor:
    """int64 [words]: what `upload` sends, for at least one array."""
    words = [_words(array) for array in arrays]
    packed = torch.empty(sum(map(len, words)), dtype=torch.int64, pin_memory=pinned)
    np.concatenate(words, out=packed.numpy())
    return packed


def unpack_arrays(packed: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """The tensors that `upload` returns, as views of what `pack_arrays` made of the arrays."""
    parts = packed.split([_num_words(array) for array in arrays])
    return [_unpack(part, array) for part, array in zip(parts, arrays)]


def _num_words(array: np.ndarray) -> int:
    return array.size if array.dtype.kind != "f" else -(-array.nbytes // 8)


def _copied(array: np.ndarray) -> torch.Tensor:
    """A copy of the array as `upload` returns it, on a CPU."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "f" and size in _FLOATS:
        copy = torch.empty(array.shape, dtype=_FLOATS[size])
    elif kind in "ib" or (kind == "u" and size < 8):
        copy = torch.empty(array.shape, dtype=torch.int64)
    else:
        raise TypeError(f"{array.dtype} {_CANNOT}")
    copy.numpy()[...] = array
    return copy


def _words(array: np.ndarray) -> np.ndarray:
    """The array as part of the packed copy: integers, or words of 8 bytes."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    flat = array if array.ndim == 1 else array.reshape(-1)
    if kind in "ib" or (kind == "u" and size < 8):
        return flat
    if kind != "f" or size not in _FLOATS:
        raise TypeError(f"{array.dtype} {_CANNOT}")
    padded = np.zeros(-(-array.nbytes // 8) * 8 // size, dtype=array.dtype)
    padded[: array.size] = flat
    return padded.view(np.int64)


def _unpack(words: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    if array.dtype.kind == "f":
        words = words.view(_FLOATS[array.dtype.itemsize])[: array.size]
    return words if array.ndim == 1 else words.view(array.shape)


class HostCopy:
    """Tensors on their way to the host."""

    def __init__(self, tensors: list[torch.Tensor], copied: torch.cuda.Event | None) -> None:
        """tensors: where they will be on the host, in pinned memory once ``copied``; None: there they are."""
        self._tensors = tensors
        self._copied = copied

    def wait(self) -> list[np.ndarray]:
        """Wait for the copy and return the tensors as arrays."""
        if self._copied is None:
            return [tensor.numpy() for tensor in self._tensors]
        self._copied.synchronize()
        return [tensor.numpy().copy() for tensor in self._tensors]  # frees the pinned memory even if an array is kept


def to_host(tensors: Sequence[torch.Tensor]) -> HostCopy:
    """Start to copy contiguous int32, int64 and float32 tensors of one device to the host: one copy, one event. Pass
    int64 tensors first, so that they are aligned.

    Do not write to the tensors before `HostCopy.wait` has returned; on a CPU, not even after that.
    """
    if not tensors or tensors[0].device.type != "cuda":
        return HostCopy(list(tensors), None)
    packed = pack(tensors)
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return HostCopy(unpack(host, tensors), copied)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """int32 [words]: int32, int64 and float32 tensors of one device, one behind the other."""
    return torch.cat([tensor.reshape(-1).view(torch.int32) for tensor in tensors])


def unpack(packed: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that `pack` was given, as views of what it made of them; ``likes`` give types and shapes. int64
    tensors come first, so that they are aligned."""
    parts = packed.split([like.numel() * like.element_size() // 4 for like in likes])
    return [part.view(like.dtype).view(like.shape) for part, like in zip(parts, likes)]
