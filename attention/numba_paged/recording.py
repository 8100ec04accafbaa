"""Records the calls of a computation once, to run them all by one call: what a CUDA graph is on a GPU.

For a step of a few tokens, starting eighty kernels one by one from Python costs a third of its time, and each start
may lose the interpreter's lock to another thread. A recording runs as one function on all threads: each call in turn,
then a barrier.

While something is recorded nothing is computed, and all memory comes from an `Arena`. So everything that is to be
computed must be a `Call` of the team: what torch computed meanwhile would be computed once, and not whenever the
recording is run. It is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .compiling import KernelFunction, kernel_builder
from .team import Call, Team

COUNT, CALLS, BARRIER = 1, 2, 3
"""Indices of the program's arguments. A call is two int64: the addresses of function and arguments."""
ARGUMENTS = 4
ALIGNMENT = 64


class Arena:
    """Memory that is handed out again once no tensor lies over it. Recordings of which no two run at the same time may
    share one; record the largest first."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._users: list[weakref.ref[np.ndarray] | None] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The smallest free block that is large enough, or a new one."""
        size = prod(shape) * dtype.itemsize
        free = [
            (len(block), number)
            for number, (block, user) in enumerate(zip(self._blocks, self._users))
            if len(block) >= size and (user is None or user() is None)
        ]
        if free:
            _, number = min(free)
        else:
            number = len(self._blocks)
            self._blocks.append(_aligned(size))
            self._users.append(None)
        used = self._blocks[number][:size]
        self._users[number] = weakref.ref(used)  # every tensor over it keeps this very array alive
        return torch.from_numpy(used).view(dtype).view(*shape)


def _aligned(size: int) -> np.ndarray:
    """uint8 [size, rounded up]"""
    rounded = -(-size // ALIGNMENT) * ALIGNMENT
    memory = np.empty(rounded + ALIGNMENT, dtype=np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:rounded]


class NotRecordable(RuntimeError):
    """torch was asked to compute something while calls were recorded."""


class _Refusal(TorchDispatchMode):
    """Allows torch to make views of memory, and nothing else."""

    LOOKS = frozenset({"view", "slice", "select", "unsqueeze", "unflatten", "alias", "detach", "lift_fresh"})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its compiler, in seconds, to keep it away from this mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in self.LOOKS:
            raise NotRecordable(f"{func} is torch's, and would not be computed again")
        return func(*args, **(kwargs or {}))


class Recording:
    """See team.Recorder."""

    def __init__(self, arena: Arena) -> None:
        self.calls: list[Call] = []
        self._arena = arena

    def add_call(self, call: Call) -> None:
        self.calls.append(call if call.lasts else call.copied_to(np.empty(len(call.arguments), dtype=np.int64)))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._arena.empty(shape, dtype)


class Program:
    """Calls that are run as one."""

    def __init__(self, team: Team, calls: Sequence[Call], arena: Arena) -> None:
        """The owners of calls that last reset them to 0 before each run; this object resets the others. arena: holds
        the intermediate results, and is kept alive as long as this object."""
        own = [call for call in calls if not call.lasts]
        self._arguments = np.zeros((len(own), max((len(call.arguments) for call in own), default=1)), dtype=np.int64)
        places = iter(self._arguments)
        self._calls = [call if call.lasts else call.copied_to(next(places)) for call in calls]
        self._table = np.array([(call.function, call.address) for call in self._calls], dtype=np.int64)
        self._team, self._arena = team, arena
        self._whole = Call(program_kernel(), ARGUMENTS)
        self._whole.arguments[COUNT], self._whole.arguments[CALLS] = len(calls), self._table.ctypes.data
        self._whole.arguments[BARRIER] = team.barrier

    def run(self) -> None:
        self._arguments[:, 0] = 0
        self._team.run(self._whole, torch.get_num_threads())


class TeamRecorder:
    """runner.cuda_graph.Recorder for computations of one team."""

    name: ClassVar[str] = "recorded steps"

    def __init__(self, team: Team) -> None:
        self._team = team
        self._arena = Arena()

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """-> (the output, a function that recomputes it from the current contents of the inputs). Raises
        NotRecordable."""
        self._team.recorder = recording = Recording(self._arena)
        try:
            with _Refusal():
                output = run()
        finally:
            self._team.recorder = None
        return output, Program(self._team, recording.calls, self._arena).run


@kernel_builder
def program_kernel() -> KernelFunction:
    from .operations import call_at, call_with, peek

    def program(a: Any) -> None:
        for number in range(peek(a + 8 * COUNT)):
            at = peek(a + 8 * CALLS) + 16 * number
            call_with(peek(at), peek(at + 8))
            call_at(peek(a + 8 * BARRIER))

    return program
