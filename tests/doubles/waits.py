"""Finds, on a CPU, what would make the host wait for a GPU.

    with no_waits():
        step_runner.launch(batch, previous)

raises WouldWait where a tensor's value is read on the host (`item`, `bool(t)`, `nonzero`, boolean masks as indices, …),
and where data crosses between host and device other than through `runtime/runner/device_copy.py` (`torch.tensor`,
`from_numpy`, `.to(device)`, `.cpu()`, lists as indices, numbers written to indexed places, …).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import baton.runtime.runner.device_copy


class WouldWait(AssertionError):
    """A GPU would be waited for here."""


READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose"}
SIZED_BY_VALUES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
CROSSINGS = {"numpy", "cpu", "cuda", "pin_memory", "tensor", "as_tensor", "asarray", "new_tensor", "__array__"}

READING_KERNELS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_static", "masked_select"),
    *("_unique2", "unique_dim", "unique_consecutive", "bincount", "lift_fresh"),
}


def _from_device_copy() -> bool:
    """Whether device_copy asked for what is being intercepted."""
    own = (__file__, torch.overrides.__file__)
    frame = sys._getframe()
    while frame.f_back is not None and (frame.f_code.co_filename in own or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename == baton.runtime.runner.device_copy.__file__


def _parts(index: Any) -> Sequence[Any]:
    return index if isinstance(index, tuple) else (index,)


class _Calls(TorchFunctionMode):
    """What Python asks of torch."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in READS or name in SIZED_BY_VALUES:
            raise WouldWait(f"{name} reads values of the device")
        if name in CROSSINGS and not _from_device_copy():
            raise WouldWait(f"{name} copies between host and device, past device_copy")
        if name == "to" and not _from_device_copy():
            named = [*args[1:], kwargs.get("device")]
            if any(isinstance(value, str | torch.device | torch.Tensor) for value in named):
                raise WouldWait("to(device) copies between host and device, past device_copy")
        if name in ("__getitem__", "__setitem__"):
            self.check_index(args)
        return func(*args, **kwargs)

    def check_index(self, args: Sequence[Any]) -> None:
        parts = _parts(args[1])
        if any(isinstance(part, list | np.ndarray) for part in parts):
            raise WouldWait("an index from the host is copied to the device")
        if len(args) == 3 and any(isinstance(part, torch.Tensor) for part in parts):
            value = args[2]
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                raise WouldWait("a number that is written to indexed places is copied to the device")


class _Kernels(TorchDispatchMode):
    """What torch asks of the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in READING_KERNELS:
            raise WouldWait(f"{name} reads values of the device, or takes them from the host")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                raise WouldWait("how many places a mask has is known on the device alone")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise WouldWait("how often values are repeated is known on the device alone")
        return func(*args, **kwargs)


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise WouldWait("from_numpy gives a tensor that is copied to the device, past device_copy")


@contextmanager
def no_waits() -> Iterator[None]:
    with mock.patch.object(torch, "from_numpy", _refuse), _Calls(), _Kernels():
        yield
