"""Attention on a CPU that reads K and V where they lie, by a kernel of Numba's.

Long extends may stay torch's (torch_native.py), where that is faster: there each key is used so often that gathering it
costs nothing, and what counts is how fast a processor's own library multiplies matrices.

Steps without such extends can be recorded (recording.py). Which tokens are of which sequence is not part of a
recording: it has a number of tokens, and what they attend to is planned before each replay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, ClassVar

import numpy as np
import torch

from ...memory_pool.kv_pool import KVPool
from ..backend import AttentionBatch, AttentionSpec, GraphKind, GraphShape, Reach
from ..torch_native import TorchNativeBackend
from . import arguments as args
from .arguments import ARGUMENTS
from .copying import RowCopy
from .kernel import attention_kernel, scratch_bytes
from .kinds import LOG2_E
from .pieces import TOKENS_AT_ONCE, Work, cut
from .team import Call, Team

SHORT_EXTEND = 32
"""New tokens up to which the kernel is faster than tiles on any processor."""

ANY_EXTEND = 1 << 30

LEAST_SHARED_KEYS = 128
"""If reading a prefix once saves fewer keys than this, its beams are attended one by one."""

ONE_THREAD = 1024
"""Work up to which one thread is faster than waking the others, in keys × tokens."""

ROWS_OF_MANY = 4
"""Heads over one latent that the kernel computes together, as rows of a block. If this does not divide the number of
heads, the largest smaller divisor is used."""

Shape = tuple[int, int, int, bool, bool]
"""Head size, rows over one KV head, size of a value, with a cap, with sinks: what a kernel is compiled for. Rows are
the queries of a token, or a part of them: see `kernel_rows`."""

Kind = tuple[Reach, int, Shape]
"""Reach, KV heads and shape: what layers have in common that share a task."""

OF_A_LAYER = [
    *(args.QUERIES, args.QUERY_STEP, args.KEYS, args.VALUES, args.OUT, args.OUT_STEP),
    *(args.SCALE, args.INNER, args.SINKS, args.LEFT),
]
OF_A_TASK = np.array([number for number in range(ARGUMENTS) if number not in OF_A_LAYER])
"""Arguments that are the same for all layers of a kind, or not."""


@dataclass(slots=True)
class _Task:
    """The work that layers of one kind share in a step."""

    work: Work
    arguments: np.ndarray
    """int64 [ARGUMENTS], of the kernel; those of a layer are missing."""
    group_sizes: np.ndarray
    """int64 [groups]: pieces of each."""
    threads: int
    kept: tuple[torch.Tensor, torch.Tensor]
    """Keeps alive the memory that the arguments point to."""


class _Calls:
    """Calls of one kind: of several layers that are recorded, or one that is run for all layers in turn."""

    def __init__(self, call: Call, count: int) -> None:
        self._arguments = np.zeros((count, ARGUMENTS), dtype=np.int64)
        floats = self._arguments.view(np.float32)
        self._scales, self._inner_scales = floats[:, 2 * args.SCALE], floats[:, 2 * args.INNER]
        self._left = np.empty(0, dtype=np.int64)
        self.calls = [call.copied_to(row) for row in self._arguments]

    def place(
        self,
        number: int,
        spec: AttentionSpec,
        pool: KVPool,
        q: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> Call:
        """Set the addresses of one layer, and return its call. q and out: float32 [tokens, heads, size of a head];
        sinks: see AttentionBackend.run."""
        q, out = _in_parts(spec, q), _in_parts(spec, out)
        call = self.calls[number]
        a, k, v = call.arguments, pool.k[spec.layer_id], pool.v[spec.layer_id]
        a[args.QUERIES], a[args.QUERY_STEP] = q.data_ptr(), 4 * q.stride(0)
        a[args.KEYS], a[args.VALUES] = k.data_ptr(), v.data_ptr()
        a[args.OUT], a[args.OUT_STEP] = out.data_ptr(), 4 * out.stride(0)
        if spec.logit_cap is None:
            self._scales[number] = spec.scale * LOG2_E
        else:
            self._scales[number], self._inner_scales[number] = spec.logit_cap * LOG2_E, spec.scale / spec.logit_cap
        if spec.has_sinks:
            a[args.SINKS] = _address_of_sinks(spec, sinks)
        return call

    def start_task(self, task: _Task) -> None:
        """Set the work of a new task; none of it is done yet."""
        count = len(self._arguments)
        self._arguments[:, OF_A_TASK] = task.arguments[OF_A_TASK]
        if len(task.group_sizes):
            self._left = np.tile(task.group_sizes, (count, 1))  # each counted down by a kernel
            self._arguments[:, args.LEFT] = self._left.ctypes.data + self._left.strides[0] * np.arange(count)

    def restart_task(self, task: _Task) -> None:
        """As `start_task`, for the same task once more."""
        self._arguments[:, [args.NEXT, args.TICKET]] = 0
        if len(task.group_sizes):
            self._left[:] = task.group_sizes


class _Planner:
    """Makes tasks, in memory of its own. One step at a time."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._partial = torch.empty(0)

    def prepare(self, batch: AttentionBatch, members: np.ndarray, spec: AttentionSpec) -> _Task:
        """members: bool [bs], the sequences that are attended."""
        threads, group, value_size = torch.get_num_threads(), kernel_rows(spec), spec.value_size
        shared = [each for each in batch.shared if (each.count - 1) * each.length >= LEAST_SHARED_KEYS]
        parts = spec.group // group
        work = cut(batch, members, shared, spec.reach, spec.num_kv_heads, threads, parts)
        scratch, floats = scratch_bytes(spec.head_dim, value_size, group, TOKENS_AT_ONCE), work.partial_tokens * group
        if self._scratch.numel() < threads * scratch:
            self._scratch = torch.empty(threads * scratch, dtype=torch.uint8)
        if self._partial.numel() < floats * (value_size + 2):
            self._partial = torch.empty(floats * (value_size + 2))
        sizes = work.groups[:, 1] - work.groups[:, 0]
        k, v = self._pool.k[spec.layer_id], self._pool.v[spec.layer_id]
        table, partial = batch.req_to_token, self._partial.data_ptr()
        a = np.zeros(ARGUMENTS, dtype=np.int64)
        a[args.COUNT], a[args.PIECES] = len(work.pieces), work.pieces.ctypes.data
        a[args.ROWS], a[args.BEGINS], a[args.ENDS] = (x.ctypes.data for x in (work.rows, work.begins, work.ends))
        a[args.GROUPS] = work.groups.ctypes.data
        a[args.TABLE], a[args.TABLE_STEP] = table.data_ptr(), 4 * table.stride(0)
        a[args.SLOT_STEP], a[args.VALUE_STEP] = (each.stride(0) * each.element_size() for each in (k, v))
        a[args.LARGEST], a[args.TOTALS], a[args.SUMS] = partial, partial + 4 * floats, partial + 8 * floats
        a[args.SCRATCH], a[args.SCRATCH_STEP] = self._scratch.data_ptr(), scratch
        few = 1 if work.cost <= ONE_THREAD else threads
        return _Task(work, a, sizes, few, (self._scratch, self._partial))


class _Kernels:
    """The kernels of a model, and what brings their queries and results from its type to float32 and back."""

    def __init__(self, pool: KVPool, specs: Sequence[AttentionSpec], team: Team) -> None:
        self._team, self._dtype = team, pool.model_dtype
        kind = str(pool.dtype).removeprefix("torch.")
        self._kernels: dict[Shape, Any] = {}
        self._widen: dict[int, RowCopy] = {}
        self._narrow: dict[int, RowCopy] = {}
        for shape in {_shape(spec) for spec in specs}:
            head_dim, group, value_dim, has_cap, has_sinks = shape
            self._kernels[shape] = attention_kernel(
                head_dim, group, kind, value_dim=value_dim, has_cap=has_cap, has_sinks=has_sinks
            )
        if self._dtype != torch.float32:
            for size in {spec.num_heads * spec.head_dim for spec in specs}:
                self._widen[size] = RowCopy(team, size, self._dtype, torch.float32)
            for size in {spec.num_heads * spec.value_size for spec in specs}:
                self._narrow[size] = RowCopy(team, size, torch.float32, self._dtype)

    def call(self, spec: AttentionSpec, *, lasts: bool = False) -> Call:
        return Call(self._kernels[_shape(spec)], ARGUMENTS, lasts=lasts)

    def widened(self, q: torch.Tensor) -> torch.Tensor:
        return q if q.dtype == torch.float32 else self._widen[q.shape[1] * q.shape[2]](q)

    def narrowed(self, out: torch.Tensor) -> torch.Tensor:
        return out if self._dtype == torch.float32 else self._narrow[out.shape[1] * out.shape[2]](out)


def kernel_rows(spec: AttentionSpec) -> int:
    """Rows of the kernel: a token's queries over one KV head, or a part of the many over a latent."""
    if not spec.values_in_keys or spec.has_sinks:  # the kernel finds a token's sinks by its KV head alone
        return spec.group
    return max(rows for rows in range(1, ROWS_OF_MANY + 1) if spec.group % rows == 0)


def _in_parts(spec: AttentionSpec, heads: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, numbers], with the heads of a token in parts of `kernel_rows`, each as a token of its own. Raises
    ValueError where the kernel would need a copy, which it could not take in a recorded step."""
    rows = kernel_rows(spec)
    if rows == spec.group:
        return heads
    if not heads.is_contiguous():
        raise ValueError(f"queries over latents: strides {heads.stride()}; pass a contiguous tensor")
    return heads.view(-1, rows, heads.shape[2])


def _shape(spec: AttentionSpec) -> Shape:
    return spec.head_dim, kernel_rows(spec), spec.value_size, spec.logit_cap is not None, spec.has_sinks


def _kind(spec: AttentionSpec) -> Kind:
    return spec.reach, spec.num_kv_heads, _shape(spec)


def _address_of_sinks(spec: AttentionSpec, sinks: torch.Tensor | None) -> int:
    """Raises ValueError unless the kernel can read them where they are."""
    if sinks is None or sinks.dtype != torch.float32 or sinks.shape != (spec.num_heads,) or not sinks.is_contiguous():
        found = "none" if sinks is None else f"{sinks.dtype} {tuple(sinks.shape)}, strides {sinks.stride()}"
        raise ValueError(f"sinks of layer {spec.layer_id}: {found}; pass contiguous float32 ({spec.num_heads},)")
    return sinks.data_ptr()


class NumbaPagedBackend:
    """GraphBackend over a KVPool on a CPU. One step at a time."""

    name: ClassVar[str] = "numba"

    def __init__(
        self,
        kv_pool: KVPool,
        specs: Sequence[AttentionSpec],
        *,
        team: Team,
        longest_extend: int = SHORT_EXTEND,
    ) -> None:
        """specs: of all layers; their kernels are compiled here. longest_extend: more new tokens of a sequence are
        attended by torch."""
        self._longest_extend = longest_extend
        self._pool, self._team = kv_pool, team
        self._kernels = _Kernels(kv_pool, specs, team)
        self._planner = _Planner(kv_pool)
        self._calls = {_kind(spec): _Calls(self._kernels.call(spec), 1) for spec in specs}
        self._specs = list(specs)
        self._long = TorchNativeBackend(kv_pool)
        self._batch: AttentionBatch | None = None
        self._is_long = np.empty(0, dtype=bool)
        self._has_short = False
        self._long_tokens: slice | torch.Tensor | None = None
        self._tasks: dict[Kind, _Task] = {}

    def plan(self, batch: AttentionBatch) -> None:
        """See AttentionBackend.plan. Pieces are cut when the first layer with a given reach needs them."""
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

    def run(self, spec: AttentionSpec, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionBackend.run."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("run before plan: call plan(batch) once per step")
        out = torch.empty((*q.shape[:2], spec.value_size), dtype=torch.float32)
        if self._long_tokens is not None:
            out[self._long_tokens] = self._long.run(spec, q[self._long_tokens], sinks).float()
        if self._has_short:
            calls, task = self._calls[_kind(spec)], self._tasks.get(_kind(spec))
            if task is None:
                task = self._tasks[_kind(spec)] = self._planner.prepare(batch, ~self._is_long, spec)
                calls.start_task(task)
            else:
                calls.restart_task(task)
            wide = self._kernels.widened(q.contiguous() if spec.values_in_keys else q)
            self._team.run(calls.place(0, spec, self._pool, wide, out, sinks), task.threads)
        return self._kernels.narrowed(out)

    # -- recorded steps ------------------------------------------------------------------------------------------------

    def graph_kind(self, batch: AttentionBatch) -> GraphKind:
        """See GraphBackend.graph_kind. A recording is of so many tokens, whatever they are of."""
        return GraphKind.DECODE

    def fits_graph(self, batch: AttentionBatch, shape: GraphShape) -> bool:
        """See GraphBackend.fits_graph."""
        return bool((batch.extend_lens <= self._longest_extend).all())

    def open_graph(self, shape: GraphShape) -> RecordedAttention:
        """See GraphBackend.open_graph."""
        return RecordedAttention(self._pool, self._specs, self._kernels, self._planner, self._team)


class RecordedAttention:
    """GraphAttention of a recording, see recording.py."""

    name: ClassVar[str] = NumbaPagedBackend.name

    def __init__(
        self, pool: KVPool, specs: Sequence[AttentionSpec], kernels: _Kernels, planner: _Planner, team: Team
    ) -> None:
        self._pool, self._kernels, self._planner, self._team = pool, kernels, planner, team
        self._of_kind: defaultdict[Kind, list[AttentionSpec]] = defaultdict(list)
        for spec in specs:
            self._of_kind[_kind(spec)].append(spec)
        self._calls = {
            kind: _Calls(kernels.call(alike[0], lasts=True), len(alike)) for kind, alike in self._of_kind.items()
        }
        self._numbers = {spec: cycle(_places_of(spec, self._of_kind[_kind(spec)])) for spec in specs}
        """Which call of its kind a layer is; layers that share their K and V may have equal specs, and take turns."""
        self._tasks: list[_Task] = []

    def plan(self, batch: AttentionBatch) -> None:
        """See AttentionBackend.plan: gives every layer its work."""
        all_sequences = np.ones(len(batch.extend_lens), dtype=bool)
        self._tasks = []  # kept while they are run
        for kind, calls in self._calls.items():
            task = self._planner.prepare(batch, all_sequences, self._of_kind[kind][0])
            self._tasks.append(task)
            calls.start_task(task)

    def run(self, spec: AttentionSpec, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionBackend.run. Called once for each layer, while it is recorded."""
        wide = self._kernels.widened(q)
        out = self._team.empty((*q.shape[:2], spec.value_size), torch.float32)
        number = next(self._numbers[spec])
        self._team.run(self._calls[_kind(spec)].place(number, spec, self._pool, wide, out, sinks), 1)
        return self._kernels.narrowed(out)

    def freeze(self) -> None:
        """See GraphAttention.freeze: nothing moves."""


def _places_of(spec: AttentionSpec, specs: Sequence[AttentionSpec]) -> list[int]:
    return [number for number, other in enumerate(specs) if other == spec]


def _tokens_of(batch: AttentionBatch, members: np.ndarray) -> slice | torch.Tensor:
    """The step's tokens of some sequences: a slice where they lie side by side."""
    tokens = np.flatnonzero(np.repeat(members, batch.extend_lens))
    if tokens[-1] - tokens[0] + 1 == len(tokens):
        return slice(int(tokens[0]), int(tokens[-1]) + 1)
    return torch.from_numpy(tokens)
