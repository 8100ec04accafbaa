"""One step as layers with recurrent states see it.

A row's new tokens are cut into segments where a state is written. Each segment starts from a slot and writes one; the
first segment of a row starts from the row's source, each later one from what the segment before it wrote:

    row 0   tokens 0 … 6    source 4 ── 0…4 ──▶ slot 9 ── 5…6 ──▶ slot 7
    row 1   token  7        source 0 ── 7 ──▶ slot 3

A kernel that walks through tokens takes `rows` and writes states on its way. One that computes a segment at once takes
`waves`: wave w holds segment w of all rows that have one, so that nothing in a wave depends on anything else in it. One
that computes segments of any lengths at once takes `packed`, which are the waves with their tokens side by side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....memory_pool.state_pool import StatePool
from ....scheduler.batch import StateRows


@dataclass(slots=True, frozen=True)
class RowSegments:
    """The segments of all rows, row after row, on the host; int32 arrays, contiguous."""

    token_ends: np.ndarray
    """[bs]: where each row's tokens end among those of the step; a row begins where the one before it ends."""
    sources: np.ndarray
    """[bs]: slot that the row starts from; 0 reads zeros."""
    segment_ends: np.ndarray
    """[bs]: where each row's segments end among those of the step."""
    ends: np.ndarray
    """[m]: token of the step after which the segment ends."""
    targets: np.ndarray
    """[m]: slot that is written there."""


@dataclass(slots=True, frozen=True)
class Wave:
    """Segments that do not depend on each other, ascending by their tokens."""

    starts: np.ndarray
    """int64 [k], host: first token of the step."""
    stops: np.ndarray
    """int64 [k], host: one behind the last."""
    sources: torch.Tensor
    """int64 [k], on the device: slot to start from; slot 0 holds zeros. All are read before any target is written."""
    targets: torch.Tensor
    """int64 [k], on the device: slot to write; no slot twice."""
    begins: np.ndarray
    """bool [k], host: the segment starts from nothing (source 0)."""

    @property
    def is_single(self) -> bool:
        """True if every segment is one token: then the tokens are ``starts``."""
        return bool((self.stops - self.starts == 1).all())


@dataclass(slots=True, frozen=True)
class PackedWave:
    """The segments of a wave one after the other."""

    tokens: torch.Tensor | None
    """int64 [n], on the device: their tokens among those of the step; None if they are all of these, in order."""
    bounds: torch.Tensor
    """int64 [k + 1], on the device: segment i has the tokens from bounds[i] to bounds[i + 1] of the wave."""
    host_bounds: torch.Tensor
    """The same on the host."""
    alone: torch.Tensor
    """bool [n], on the device: the token is the only one of its segment."""
    sources: torch.Tensor
    targets: torch.Tensor
    is_single: bool
    """These three as in `Wave`."""

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens of the step, …] -> [n, …]"""
        return rows if self.tokens is None else rows.index_select(0, self.tokens)

    def put(self, out: torch.Tensor, found: torch.Tensor) -> None:
        """Write what was found for the wave's tokens, [n, …], to the step's."""
        if self.tokens is None:
            out.copy_(found)
        else:
            out.index_copy_(0, self.tokens, found)


class RowTable:
    """A step's `RowSegments` for compiled code: the number of rows, then the addresses of token_ends, sources,
    segment_ends, ends and targets; int64 [6]. The table may be pointed at the rows of another step."""

    __slots__ = ("_entries", "_rows", "address")

    def __init__(self, rows: RowSegments) -> None:
        self._entries = np.empty(6, dtype=np.int64)
        self.address = self._entries.ctypes.data
        self.point_at(rows)

    def point_at(self, rows: RowSegments) -> None:
        self._rows = rows  # keeps the arrays
        arrays = rows.token_ends, rows.sources, rows.segment_ends, rows.ends, rows.targets
        self._entries[:] = len(rows.sources), *(array.__array_interface__["data"][0] for array in arrays)


class StateBatch:
    """The states of a step. Layer i with states (counted among those) uses ``pool.layers[i]``.

    rows, table, waves and packed are the same segments in different forms; all but the first are made when they are
    first asked for.
    """

    __slots__ = ("_lens", "_packed", "_row_of", "_table", "_waves", "pool", "rows")

    def __init__(self, pool: StatePool, states: StateRows, extend_lens: np.ndarray) -> None:
        self.pool, self.rows = pool, row_segments(states, extend_lens)
        self._row_of, self._lens = states.rows, extend_lens
        self._table: RowTable | None = None
        self._waves: list[Wave] | None = None
        self._packed: list[PackedWave] | None = None

    @property
    def table(self) -> RowTable:
        if self._table is None:
            self._table = RowTable(self.rows)
        return self._table

    @property
    def waves(self) -> list[Wave]:
        if self._waves is None:
            self._waves = _cut_waves(self.pool, self.rows, self._row_of, self._lens)
        return self._waves

    @property
    def packed(self) -> list[PackedWave]:
        if self._packed is None:
            count = int(self._lens.sum())
            self._packed = [_pack(wave, count) for wave in self.waves]
        return self._packed


def row_segments(states: StateRows, extend_lens: np.ndarray) -> RowSegments:
    """Number a step's segments by its tokens. extend_lens: int32 [bs], new tokens of each row."""
    token_ends = np.cumsum(extend_lens, dtype=np.int32)
    starts = token_ends - extend_lens
    counts = np.bincount(states.rows, minlength=len(extend_lens))
    return RowSegments(
        token_ends=token_ends,
        sources=np.ascontiguousarray(states.sources, dtype=np.int32),
        segment_ends=np.cumsum(counts, dtype=np.int32),
        ends=starts[states.rows] + states.ends,
        targets=np.ascontiguousarray(states.slots, dtype=np.int32),
    )


def plan_states(pool: StatePool, states: StateRows, extend_lens: np.ndarray) -> StateBatch:
    """Prepare a step's states for the layers. extend_lens: int32 [bs], new tokens of each row."""
    return StateBatch(pool, states, extend_lens)


class StatePlanner:
    """Plans steps as `plan_states` does. Decodes of the same requests repeat the `StateRows` of the step before, or of
    the one before that (scheduler/memory/state_memory.py); their batch is then used again, with what it has uploaded.
    """

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self._last: deque[tuple[StateRows, StateBatch]] = deque(maxlen=2)

    def plan_states(self, states: StateRows, extend_lens: np.ndarray) -> StateBatch:
        """See the function of this name. The same object ``states`` stands for the same ``extend_lens``."""
        for planned, batch in self._last:
            if planned is states:
                return batch
        batch = plan_states(self._pool, states, extend_lens)
        self._last.append((states, batch))
        return batch


def _cut_waves(pool: StatePool, rows: RowSegments, row_of: np.ndarray, extend_lens: np.ndarray) -> list[Wave]:
    """The segments by their places in their rows. row_of: int32 [m]."""
    if len(rows.ends) == len(extend_lens):  # one segment each: every plain decode, and most prompts
        starts = (rows.token_ends - extend_lens).astype(np.int64)
        return [_wave(pool, starts, rows.ends, rows.sources, rows.targets)]
    first = np.ones(len(rows.ends), dtype=bool)
    first[1:] = row_of[1:] != row_of[:-1]
    before = np.roll(rows.ends, 1)
    starts = np.where(first, (rows.token_ends - extend_lens)[row_of], before)
    sources = np.where(first, rows.sources[row_of], np.roll(rows.targets, 1))
    number = np.arange(len(rows.ends)) - np.flatnonzero(first)[np.cumsum(first) - 1]
    waves = []
    for wave in range(int(number.max()) + 1):
        picked = number == wave
        waves.append(_wave(pool, starts[picked], rows.ends[picked], sources[picked], rows.targets[picked]))
    return waves


def _pack(wave: Wave, count: int) -> PackedWave:
    """count: tokens of the step."""
    lengths = wave.stops - wave.starts
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.repeat(wave.starts - bounds[:-1], lengths) + np.arange(bounds[-1])
    device = wave.sources.device
    host_bounds = torch.from_numpy(bounds)
    return PackedWave(
        tokens=None if len(tokens) == count else torch.from_numpy(tokens).to(device, non_blocking=True),
        bounds=host_bounds.to(device, non_blocking=True),
        host_bounds=host_bounds,
        alone=torch.from_numpy(np.repeat(lengths == 1, lengths)).to(device, non_blocking=True),
        sources=wave.sources,
        targets=wave.targets,
        is_single=wave.is_single,
    )


def start_states(pool: StatePool, extend_lens: Sequence[int]) -> StateBatch:
    """A step whose rows all start from nothing and write to the trash slot: for trials and profile runs."""
    lens = np.array(extend_lens, dtype=np.int32)
    rows = np.arange(len(lens), dtype=np.int32)
    trash = np.full(len(lens), pool.trash, dtype=np.int32)
    return plan_states(pool, StateRows(np.zeros(len(lens), dtype=np.int32), rows, lens, trash), lens)


def _wave(pool: StatePool, starts: np.ndarray, stops: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> Wave:
    slots = torch.from_numpy(np.stack((sources, targets)).astype(np.int64)).to(pool.device, non_blocking=True)
    return Wave(starts.astype(np.int64), stops.astype(np.int64), slots[0], slots[1], sources == 0)
