"""Runs compiled functions on the threads that torch computes with.

A second set of threads beside torch's would be ruinous: both spin on the same cores while they wait for work. So a
function is handed to the OpenMP library that torch has loaded, by the call that compilers make of ``omp parallel``
(GNU's libgomp; LLVM's library has the same one). How many threads there are, and for how long they spin, is then
decided in one place for all (runtime/runner/cpu_threads.py).

The calls of a team can be recorded (recording.py) and then run as a whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from .compiling import Kernel


class NoTeamError(RuntimeError):
    """torch's OpenMP library cannot be found or called."""


class Call:
    """A compiled ``void f(address of its arguments)`` and its arguments, int64 all.

    The first argument counts what the threads have taken. The owner of a call sets it to 0 before each run, and every
    thread adds to it until nothing is left.
    """

    __slots__ = ("address", "arguments", "function", "lasts")

    def __init__(self, kernel: Kernel, size: int, *, lasts: bool = False) -> None:
        """lasts: a recording takes this very object, because its owner still changes its arguments; otherwise a copy
        with the present ones."""
        self.lasts = lasts
        self.arguments = (ctypes.c_int64 * size)()
        self.function, self.address = kernel.address, ctypes.addressof(self.arguments)

    def run_here(self) -> None:
        """On this thread. The GIL is free meanwhile."""
        _called(self.function)(self.address)

    def copied_to(self, arguments: np.ndarray) -> Call:
        """The same with arguments in other memory: int64, at least as many."""
        other = Call.__new__(Call)
        other.lasts, other.function = self.lasts, self.function
        other.arguments = (ctypes.c_int64 * len(self.arguments)).from_buffer(arguments.data)
        other.arguments[:] = self.arguments
        other.address = ctypes.addressof(other.arguments)
        return other


class Recorder(Protocol):
    """See recording.Recording."""

    def add_call(self, call: Call) -> None: ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...


class Team:
    """torch's threads. For one thread of Python."""

    recorder: Recorder | None = None
    """Takes the calls, instead of their being run, and gives memory for what they compute."""

    def __init__(self) -> None:
        """Raises NoTeamError."""
        library = ctypes.CDLL(_openmp_library())
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None
        self.barrier = ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value
        """The address of a ``void f()`` from which no thread returns before all have called it."""

    def run(self, call: Call, threads: int) -> None:
        """Every thread of the team calls it once; returns when all have. The GIL is free meanwhile."""
        if self.recorder is not None:
            self.recorder.add_call(call)
        elif threads > 1:
            self._parallel(call.function, call.address, threads, 0)
        else:
            call.run_here()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the CPU for what a call computes."""
        if self.recorder is not None:
            return self.recorder.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)


@cache
def _called(function: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)


def _openmp_library() -> str:
    """Raises NoTeamError."""
    torch.ones(1 << 16).add_(1)  # whatever torch loads late is loaded now
    try:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError as error:
        raise NoTeamError(f"which OpenMP library torch uses cannot be seen: {error}") from error
    found = [path for path in mapped if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]
    packages = Path(torch.__file__).resolve().parents[1]  # as the kernel names it, where the environment is a link
    # Other packages bring one of their own (sentencepiece, scikit-learn).
    of_torch = packages / "torch", packages / "torch.libs"
    own = [path for path in found if any(Path(path).is_relative_to(folder) for folder in of_torch)]
    near = [path for path in found if Path(path).is_relative_to(packages)]
    candidates = own or near or found
    if len(candidates) != 1:
        raise NoTeamError(f"torch uses one of {sorted(candidates)}" if candidates else "torch uses no OpenMP library")
    library = ctypes.CDLL(candidates[0])
    for name in ("GOMP_parallel", "GOMP_barrier"):
        if not hasattr(library, name):
            raise NoTeamError(f"{candidates[0]} has no {name}")
    return candidates[0]
