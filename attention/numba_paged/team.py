"""Runs a compiled function on the threads that torch computes with.

A second set of threads beside torch's would be ruinous: both spin on the same cores while they wait for work. So the
function is handed to the OpenMP library that torch has loaded, by the call that compilers make of ``omp parallel``
(GNU's libgomp; LLVM's library has the same one). How many threads there are, and for how long they spin, is then
decided in one place for all (runtime/runner/cpu_threads.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch


class NoTeamError(RuntimeError):
    """torch's OpenMP library cannot be found or called."""


class Team:
    """function, argument: addresses of a compiled ``void f(void *)`` and of what it is given."""

    def __init__(self) -> None:
        """Raises NoTeamError."""
        self._parallel = ctypes.CDLL(_openmp_library()).GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def run(self, function: int, argument: int, threads: int) -> None:
        """Every thread of the team calls it once; returns when all have. The GIL is free meanwhile."""
        if threads > 1:
            self._parallel(function, argument, threads, 0)
        else:
            _called(function)(argument)


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
    near = [path for path in found if Path(path).is_relative_to(Path(torch.__file__).parents[1])]
    candidates = near or found
    if len(candidates) != 1:
        raise NoTeamError(f"torch uses one of {sorted(candidates)}" if candidates else "torch uses no OpenMP library")
    if not hasattr(ctypes.CDLL(candidates[0]), "GOMP_parallel"):
        raise NoTeamError(f"{candidates[0]} has no GOMP_parallel")
    return candidates[0]
