"""Attention on a CPU that reads K and V where they lie, by a kernel of Numba's.

Long extends may stay torch's (torch_native.py), where that is faster: there each key is used so often that gathering it
costs nothing, and what counts is how fast a processor's own library multiplies matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from ...memory_pool.kv_pool import MHAKVPool
from ..backend import AttentionBatch, AttentionSpec
from ..torch_native import TorchNativeBackend
from . import kernel as args
from .kernel import ARGUMENTS, compile_kernel, scratch_bytes
from .pieces import TOKENS_AT_ONCE, Work, cut
from .team import Team

SHORT_EXTEND = 32
"""New tokens up to which the kernel is faster than tiles on any processor."""

ANY_EXTEND = 1 << 30

LEAST_SHARED_KEYS = 128
"""If reading a prefix once saves fewer keys than this, its beams are attended one by one."""

ONE_THREAD = 1024
"""Work up to which one thread is faster than waking the others, in keys × tokens."""


@dataclass(slots=True)
class _Task:
    """What layers of one kind share in a step; each fills in its tensors."""

    work: Work
    arguments: np.ndarray
    """int64 [ARGUMENTS], of the kernel."""
    left: np.ndarray
    """int64 [groups]: pieces of each that have not ended; counted down by the kernel."""
    group_sizes: np.ndarray
    threads: int
    scratch: torch.Tensor
    partial: torch.Tensor
    """Memory whose addresses are among the arguments: kept for as long as they are."""
    address: int = 0
    """Of the arguments."""
    scale: np.ndarray = field(init=False)
    """float32 [1], among the arguments."""

    def __post_init__(self) -> None:
        self.address = self.arguments.ctypes.data
        self.scale = self.arguments.view(np.float32)[2 * args.SCALE :][:1]


class NumbaPagedBackend:
    """AttentionBackend over an MHAKVPool on a CPU. One step at a time."""

    name: ClassVar[str] = "numba"

    def __init__(
        self, kv_pool: MHAKVPool, specs: Sequence[AttentionSpec], *, longest_extend: int = SHORT_EXTEND
    ) -> None:
        """specs: of all layers; their kernels are compiled here. longest_extend: more new tokens of a sequence are
        attended by torch. Raises NoTeamError."""
        self._longest_extend = longest_extend
        self._pool = kv_pool
        self._team = Team()
        kind = str(kv_pool.dtype).removeprefix("torch.")
        self._kernels = {
            (spec.head_dim, group): compile_kernel(spec.head_dim, group, kind)
            for spec in specs
            for group in (spec.num_heads // spec.num_kv_heads,)
        }
        self._long = TorchNativeBackend(kv_pool)
        self._batch: AttentionBatch | None = None
        self._is_long = np.empty(0, dtype=bool)
        self._has_short = False
        self._long_tokens: slice | torch.Tensor | None = None
        self._tasks: dict[tuple[int | None, int, int, int], _Task] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._partial = torch.empty(0)

    def plan(self, batch: AttentionBatch) -> None:
        """See AttentionBackend.plan. Pieces are cut when the first layer with a given window needs them."""
        self._batch = batch
        self._tasks.clear()
        self._is_long = batch.extend_lens > self._longest_extend
        self._has_short = not self._is_long.all()
        self._long_tokens = None
        if self._is_long.any():
            self._long_tokens = _tokens_of(batch, self._is_long)
            self._long.plan(
                AttentionBatch(
                    batch.req_to_token,
                    batch.host_rows[self._is_long],
                    batch.prefix_lens[self._is_long],
                    batch.extend_lens[self._is_long],
                    batch.pad_row,
                )
            )

    def run(self, spec: AttentionSpec, q: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend.run."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("run before plan: call plan(batch) once per step")
        out = torch.empty(q.shape, dtype=torch.float32)
        if self._long_tokens is not None:
            out[self._long_tokens] = self._long.run(spec, q[self._long_tokens]).float()
        if self._has_short:
            self._attend(batch, spec, q.float(), out)
        return out.to(q.dtype)

    def _attend(self, batch: AttentionBatch, spec: AttentionSpec, q: torch.Tensor, out: torch.Tensor) -> None:
        group = spec.num_heads // spec.num_kv_heads
        kind = spec.sliding_window, spec.num_kv_heads, group, spec.head_dim
        task = self._tasks.get(kind)
        if task is None:
            task = self._tasks[kind] = self._prepare(batch, spec, group)
        k, v = self._pool.k[spec.layer_id], self._pool.v[spec.layer_id]
        a = task.arguments
        a[args.NEXT] = a[args.TICKET] = 0
        if len(task.left):
            np.copyto(task.left, task.group_sizes)
        a[args.QUERIES], a[args.QUERY_STEP] = q.data_ptr(), 4 * q.stride(0)
        a[args.KEYS], a[args.VALUES] = k.data_ptr(), v.data_ptr()
        a[args.OUT], a[args.OUT_STEP] = out.data_ptr(), 4 * out.stride(0)
        task.scale[0] = spec.scale
        self._team.run(self._kernels[spec.head_dim, group].address, task.address, task.threads)

    def _prepare(self, batch: AttentionBatch, spec: AttentionSpec, group: int) -> _Task:
        """What layers of one kind share in a step."""
        threads = torch.get_num_threads()
        shared = [each for each in batch.shared if (each.count - 1) * each.length >= LEAST_SHARED_KEYS]
        work = cut(batch, ~self._is_long, shared, spec.sliding_window, spec.num_kv_heads, threads)
        if work.cost <= ONE_THREAD:
            threads = 1
        scratch, floats = scratch_bytes(spec.head_dim, group, TOKENS_AT_ONCE), work.partial_tokens * group
        if self._scratch.numel() < threads * scratch:
            self._scratch = torch.empty(threads * scratch, dtype=torch.uint8)
        if self._partial.numel() < floats * (spec.head_dim + 2):
            self._partial = torch.empty(floats * (spec.head_dim + 2))
        sizes = work.groups[:, 1] - work.groups[:, 0]
        k, table, partial = self._pool.k[spec.layer_id], batch.req_to_token, self._partial.data_ptr()
        task = _Task(
            work, np.zeros(ARGUMENTS, dtype=np.int64), sizes.copy(), sizes, threads, self._scratch, self._partial
        )
        a = task.arguments
        a[args.COUNT], a[args.PIECES] = len(work.pieces), work.pieces.ctypes.data
        a[args.ROWS], a[args.BEGINS], a[args.ENDS] = (x.ctypes.data for x in (work.rows, work.begins, work.ends))
        a[args.GROUPS], a[args.LEFT] = work.groups.ctypes.data, task.left.ctypes.data
        a[args.TABLE], a[args.TABLE_STEP] = table.data_ptr(), 4 * table.stride(0)
        a[args.SLOT_STEP] = k.stride(0) * k.element_size()
        a[args.LARGEST], a[args.TOTALS], a[args.SUMS] = partial, partial + 4 * floats, partial + 8 * floats
        a[args.SCRATCH], a[args.SCRATCH_STEP] = self._scratch.data_ptr(), scratch
        return task


def _tokens_of(batch: AttentionBatch, members: np.ndarray) -> slice | torch.Tensor:
    """The step's tokens of some sequences: a slice where they lie side by side."""
    tokens = np.flatnonzero(np.repeat(members, batch.extend_lens))
    if tokens[-1] - tokens[0] + 1 == len(tokens):
        return slice(int(tokens[0]), int(tokens[-1]) + 1)
    return torch.from_numpy(tokens)
