"""Attention with torch's scaled_dot_product_attention: for CPUs, and the oracle for faster backends.

A step is cut into *tiles*. A tile gathers the keys of its sequences once per layer, padded to the longest of them, and
attends to them with one SDPA call per *block* of queries:

    decode, short extends      many sequences per tile, one block:     sequences × queries × keys, one mask
    long extends (prefill)     one sequence per tile, many blocks:     block b sees the keys up to its own end only
    beams of a search          their prefix read once for all:         see `SharedTile`

Grouped queries are query rows: the `group` heads that share a KV head are attended as group × queries rows over that
head, so K and V are never repeated. Tiles depend on the step and the reach, not on the layer; they are planned once,
from lengths that the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ..memory_pool.kv_pool import KVPool
from ..memory_pool.kv_rows import read_rows, select_rows
from .backend import AttentionBatch, AttentionSpec, Reach, SharedPrefix

BLOCK_ROWS = 256
"""Query rows (queries × group) per SDPA call of a long extend: large enough for full speed, small enough to skip much
of the upper triangle."""
TILE_KEYS = 2048
"""Most keys that a tile of several sequences gathers: a core's cache must hold them until they are used."""
WASTE = 0.25
"""Share of padding that grouping sequences in one tile may add."""
SCORES = 1 << 18
"""Scores computed at once: as many as fit in a core's cache."""
MIN_SAVED_KEYS = 768
"""If sharing saves fewer key reads than this, a plain tile is as fast."""


@dataclass(slots=True)
class _Block:
    """Queries attended by one SDPA call: `queries` rows of the step's tokens, as [sequences, length]."""

    queries: slice | torch.Tensor
    length: int
    keys: slice
    """The tile's keys that they see."""
    mask: torch.Tensor | None
    """Added to the scores, [sequences or 1, 1, length × group, keys]; None if all keys are visible."""
    real: tuple[torch.Tensor, torch.Tensor] | None
    """(row in the padded block, row in the step) of the queries that are not padding; None if there is no padding."""


@dataclass(slots=True)
class _Tile:
    """Keys gathered together: `slots` [sequences × length], or a slice if they lie side by side in the pool."""

    slots: slice | torch.Tensor
    sequences: int
    length: int
    blocks: list[_Block]


@dataclass(slots=True)
class SharedTile:
    """The beams of a search, planned: ``count`` sequences that begin with the same slots and have one new token each.

    The prefix's keys are read once for all of them, and the queries become the rows of one large product:

        scores  =  [ q · prefix keysᵀ (one product) | q · own tail keysᵀ (batched) ]     [kv_heads, beams × group, keys]
        out     =  softmax(scores)[prefix] · prefix values  +  softmax(scores)[tail] · own tail values

    This is cascade attention (Juravsky et al. 2024, "Hydragen"; Ye et al. 2024, "Cascade Inference"), but with one
    softmax over both parts instead of a merge by log-sum-exp. The numbers are the same, and no kernel has to return its
    sums.
    """

    queries: slice
    """Rows of the step's tokens."""
    count: int
    prefix: slice | torch.Tensor
    """Slots."""
    prefix_len: int
    tails: torch.Tensor
    """int32 [count × tail_len]: slots."""
    tail_len: int

    @property
    def keys(self) -> int:
        """Keys that are gathered."""
        return self.prefix_len + self.count * self.tail_len


@dataclass(slots=True)
class _Plan:
    """How the layers of one reach attend in a step."""

    tiles: list[_Tile]
    shared: list[SharedTile]

    @property
    def most_keys(self) -> int:
        """The most keys that are gathered at one time."""
        return max([tile.sequences * tile.length for tile in self.tiles] + [tile.keys for tile in self.shared])


@dataclass(slots=True, frozen=True)
class _Rows:
    """Host view of the sequences a step attends to; int64 [bs] each."""

    first_token: np.ndarray
    """Row of the step's tokens where the sequence's new tokens begin."""
    extend_lens: np.ndarray
    prefix_lens: np.ndarray
    key_starts: np.ndarray
    """The first position that any of the new tokens sees."""
    num_keys: np.ndarray


class TorchNativeBackend:
    """AttentionBackend over a KVPool, on any device that torch supports."""

    name: ClassVar[str] = "torch_native"

    def __init__(self, kv_pool: KVPool) -> None:
        self._pool = kv_pool
        self._batch: AttentionBatch | None = None
        self._plans: dict[tuple[Reach, int], _Plan] = {}
        self._bands: dict[tuple[int | None, int], torch.Tensor] = {}
        self._is_plain = kv_pool.dtype == kv_pool.model_dtype
        self._buffers = [torch.empty(0, dtype=kv_pool.dtype, device=kv_pool.device) for _ in range(2)]
        """Flat memory for gathered keys and values that need no conversion. Kept: fresh memory costs more than the
        gather."""

    def plan(self, batch: AttentionBatch) -> None:
        """Forget the last step. Tiles are made when the first layer with a given reach needs them."""
        self._batch = batch
        self._plans.clear()

    def run(self, spec: AttentionSpec, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionBackend.run."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("run before plan: call plan(batch) once per step")
        reach, group = spec.reach, spec.group
        plan = self._plans.get((reach, group))
        if plan is None:
            plan = self._plans[reach, group] = self._make_plan(batch, reach, group)
        pools = [self._pool.k[spec.layer_id]]
        if not spec.values_in_keys:
            pools.append(self._pool.v[spec.layer_id])
        buffers = self._rooms(pools, plan.most_keys)
        out = torch.empty(*q.shape[:-1], spec.value_size, dtype=q.dtype, device=q.device)
        for shared in plan.shared:
            attend_shared(spec, shared, q, pools, buffers, out, sinks)
        for tile in plan.tiles:
            keys = _gather(pools[0], tile, spec.head_dim, q.dtype, buffers[0])
            if spec.values_in_keys:
                values = keys[..., : spec.value_size]
            else:
                values = _gather(pools[1], tile, spec.value_size, q.dtype, buffers[1])
            for block in tile.blocks:
                _attend(spec, tile.sequences, block, q, keys, values, out, sinks)
        return out

    def _rooms(self, pools: list[torch.Tensor], keys: int) -> list[torch.Tensor | None]:
        """Room to gather so many keys, and values if there are any apart: [keys, kv_heads, size of a head] each. None
        where they are converted, to memory of their own."""
        if not self._is_plain:
            return [None] * len(pools)
        rooms: list[torch.Tensor | None] = []
        for number, pool in enumerate(pools):
            size = keys * pool.shape[1] * pool.shape[2]
            if self._buffers[number].numel() < size:
                self._buffers[number] = torch.empty(size, dtype=pool.dtype, device=pool.device)
            rooms.append(self._buffers[number][:size].view(keys, *pool.shape[1:]))
        return rooms

    def _make_plan(self, batch: AttentionBatch, reach: Reach, group: int) -> _Plan:
        extend_lens = batch.extend_lens.astype(np.int64)
        prefix_lens = batch.prefix_lens.astype(np.int64)
        key_starts = reach.first_keys(prefix_lens)
        rows = _Rows(
            first_token=np.cumsum(extend_lens) - extend_lens,
            extend_lens=extend_lens,
            prefix_lens=prefix_lens,
            key_starts=key_starts,
            num_keys=prefix_lens + extend_lens - key_starts,
        )
        groups = [shared for shared in batch.shared if saves_keys(batch, shared, reach)]
        is_plain = np.ones(len(extend_lens), dtype=bool)
        for shared in groups:
            is_plain[shared.first : shared.first + shared.count] = False
        block_length = max(BLOCK_ROWS // group, 1)
        is_long = extend_lens > block_length
        tiles = [
            self._long_tile(batch, rows, row, reach, group, block_length) for row in np.flatnonzero(is_long).tolist()
        ]
        for members in _groups(rows, np.flatnonzero(~is_long & is_plain)):
            tiles.append(self._grouped_tile(batch, rows, members, reach, group))
        return _Plan(tiles, [plan_shared(batch, shared, int(rows.first_token[shared.first])) for shared in groups])

    def _long_tile(
        self, batch: AttentionBatch, rows: _Rows, row: int, reach: Reach, group: int, block_length: int
    ) -> _Tile:
        """One sequence with its queries in blocks, each within a chunk; all masks are corners of one band."""
        first, new = int(rows.first_token[row]), int(rows.extend_lens[row])
        prefix, start, length = int(rows.prefix_lens[row]), int(rows.key_starts[row]), int(rows.num_keys[row])
        band = self._band(reach.window, group, block_length, length)
        bounds = np.arange(0, new, block_length)
        if reach.chunk is not None:
            bounds = np.union1d(bounds, np.arange(reach.chunk - prefix % reach.chunk, new, reach.chunk))
        lows = reach.first_keys(prefix + bounds) - start
        blocks = []
        for begin, end, low in zip(bounds.tolist(), [*bounds[1:].tolist(), new], lows.tolist(), strict=True):
            size, stop = end - begin, prefix + end - start
            mask = band[(block_length - size) * group :, band.shape[1] - (stop - low) :]
            blocks.append(_Block(slice(first + begin, first + end), size, slice(low, stop), mask, None))
        slots = batch.req_to_token[int(batch.host_rows[row]), start : start + length]
        return _Tile(run_or_index(slots), 1, length, blocks)

    def _grouped_tile(self, batch: AttentionBatch, rows: _Rows, members: np.ndarray, reach: Reach, group: int) -> _Tile:
        """Several sequences with few queries each, padded to [sequences, queries] over [sequences, keys]."""
        device, n = batch.req_to_token.device, len(members)
        length, keys = int(rows.extend_lens[members].max()), int(rows.num_keys[members].max())
        first, new = rows.first_token[members], rows.extend_lens[members]
        if n == 1:
            start = int(rows.key_starts[members[0]])
            slots = batch.req_to_token[int(batch.host_rows[members[0]]), start : start + keys]
            slots = run_or_index(slots, any_order=length == 1)
            position = start + torch.arange(keys, device=device).unsqueeze(0)
            is_key = None
        else:
            starts, ends = _upload(device, rows.key_starts[members], rows.key_starts[members] + rows.num_keys[members])
            position = starts.unsqueeze(1) + torch.arange(keys, device=device)
            is_key = position < ends.unsqueeze(1)
            position = torch.where(is_key, position, 0)
            table_rows = _upload(device, batch.host_rows[members])[0].unsqueeze(1)
            slots = batch.req_to_token[table_rows, position].mul_(is_key).flatten()

        column = np.minimum(np.arange(length), (new - 1)[:, None])
        token = (first[:, None] + column).ravel()
        if n * length == token[-1] - token[0] + 1 and (n == 1 or bool((np.diff(token) == 1).all())):
            queries, real = slice(int(token[0]), int(token[-1]) + 1), None
        else:
            (queries,) = _upload(device, token)
            in_block = np.flatnonzero((np.arange(length) < new[:, None]).ravel())
            real = _upload(device, in_block)[0], _upload(device, token[in_block])[0]
        mask = None
        if length > 1 or is_key is not None:
            mask = self._mask(device, rows.prefix_lens[members][:, None] + column, position, is_key, reach, group)
        return _Tile(slots, n, keys, [_Block(queries, length, slice(0, keys), mask, real)])

    def _mask(
        self,
        device: torch.device,
        query_positions: np.ndarray,
        key_positions: torch.Tensor,
        is_key: torch.Tensor | None,
        reach: Reach,
        group: int,
    ) -> torch.Tensor:
        """query_positions [n, queries], key_positions and is_key [n, keys] -> [n, 1, queries × group, keys]"""
        query, first = _upload(device, query_positions, reach.first_keys(query_positions))
        if query.shape[1] == 1 and is_key is not None:
            visible = is_key.unsqueeze(1)  # the only query is the newest token, and keys begin with the first it sees
        else:
            query, key = query.unsqueeze(2), key_positions.unsqueeze(1)
            visible = key <= query
            if reach != Reach():
                visible &= key >= first.unsqueeze(2)
            if is_key is not None:
                visible &= is_key.unsqueeze(1)
            visible = visible.repeat_interleave(group, dim=1)
        return _additive(visible, self._pool.model_dtype).unsqueeze(1)

    def _band(self, window: int | None, group: int, block_length: int, keys: int) -> torch.Tensor:
        """Mask [block_length × group, >= keys] of the last block_length queries over the last keys of a sequence.

        Causality and window depend only on the distance of query and key, so the mask of any block is the lower right
        corner of this one. It is kept, and without a window doubled when a longer sequence comes.
        """
        if window is not None:
            keys = min(keys, block_length + window - 1)
        band = self._bands.get((window, group))
        if band is None or band.shape[1] < keys:
            width = keys if window is not None else max(keys, 1024, 0 if band is None else 2 * band.shape[1])
            device = self._pool.device
            key_age = torch.arange(width - 1, -1, -1, device=device)
            query_age = torch.arange(block_length - 1, -1, -1, device=device).unsqueeze(1)
            visible = key_age >= query_age
            if window is not None:
                visible &= key_age < query_age + window
            band = _additive(visible.repeat_interleave(group, dim=0), self._pool.model_dtype)
            self._bands[window, group] = band
        return band


def _groups(rows: _Rows, members: np.ndarray) -> list[np.ndarray]:
    """Split sequences into tiles: group those of similar length while padding and gathered keys stay small."""
    if len(members) == 0:
        return []
    members = members[np.argsort(rows.num_keys[members], kind="stable")[::-1]]
    groups, current = [], [members[0]]
    longest, queries = int(rows.num_keys[members[0]]), int(rows.extend_lens[members[0]])
    work = longest * queries
    for row in members[1:]:
        more_queries = max(queries, int(rows.extend_lens[row]))
        row_work = int(rows.num_keys[row] * rows.extend_lens[row])
        padded = (len(current) + 1) * longest * more_queries
        if (len(current) + 1) * longest <= TILE_KEYS and padded <= (1 + WASTE) * (work + row_work):
            current.append(row)
            queries, work = more_queries, work + row_work
        else:
            groups.append(current)
            current, longest, queries, work = [row], int(rows.num_keys[row]), int(rows.extend_lens[row]), row_work
    groups.append(current)
    return [np.sort(np.array(group)) for group in groups]


def _gather(
    pool: torch.Tensor, tile: _Tile, size: int, dtype: torch.dtype, buffer: torch.Tensor | None
) -> torch.Tensor:
    """As `gather`; strided: [sequences, kv_heads, keys, size]."""
    found = gather(pool, tile.slots, size, dtype, buffer)
    return found.view(tile.sequences, tile.length, *found.shape[1:]).transpose(1, 2)


def _attend(
    spec: AttentionSpec,
    sequences: int,
    block: _Block,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Attend the block's queries and write them to out [tokens, num_heads, value_size]."""
    kv_heads, group, length, value_size = spec.num_kv_heads, spec.group, block.length, spec.value_size
    rows = q[block.queries]
    rows = rows.reshape(sequences, length, kv_heads, group, spec.head_dim).transpose(1, 2)
    rows = rows.reshape(sequences, kv_heads, length * group, spec.head_dim)
    keys, values = keys[:, :, block.keys], values[:, :, block.keys]
    if spec.logit_cap is None and not spec.has_sinks:
        found = F.scaled_dot_product_attention(rows, keys, values, attn_mask=block.mask, scale=spec.scale)
    else:
        scores = capped(torch.matmul(rows.float() * spec.scale, keys.float().transpose(-1, -2)), spec.logit_cap)
        if block.mask is not None:
            scores = scores + block.mask
        of_rows = None if sinks is None else sinks.view(kv_heads, 1, group).expand(-1, length, -1).reshape(kv_heads, -1)
        found = torch.matmul(weights_of(scores, of_rows), values.float()).to(out.dtype)
    found = found.view(sequences, kv_heads, length, group, value_size).transpose(1, 2)
    if block.real is None:
        out[block.queries].view(sequences, length, kv_heads, group, value_size).copy_(found)
    else:
        in_block, token = block.real
        found = found.reshape(sequences * length, spec.num_heads, value_size)
        out.index_copy_(0, token, found.index_select(0, in_block))


def capped(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap × tanh(scores / cap), as in Gemma 2 (Riviere et al. 2024); the scores themselves without a cap."""
    return scores if cap is None else torch.tanh(scores / cap) * cap


def weights_of(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the keys of float32 scores [..., rows, keys]. sinks [..., rows]: a further score of each row, which
    takes its share and has no value ("attention sinks": Xiao et al. 2024; learned in gpt-oss)."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.unsqueeze(-1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """True -> 0, False -> -inf."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def _upload(device: torch.device, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Host int arrays -> int64 device tensors, without waiting."""
    tensors = (torch.from_numpy(array.astype(np.int64)) for array in arrays)
    if device.type == "cuda":
        return tuple(tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)
    return tuple(tensors)


def run_or_index(slots: torch.Tensor, *, any_order: bool = False) -> slice | torch.Tensor:
    """int32 [keys] -> a slice of the pool if the slots are one ascending run (no copy needed), else the slots.

    any_order: the run may be shuffled, which makes no difference to a query that sees all keys. Checked on the CPU
    only: on a GPU it would wait for the device.
    """
    if slots.device.type != "cpu":
        return slots
    host = slots.numpy()
    count = len(host)
    if any_order:  # no slot occurs twice, so the extremes are enough
        first = int(host.min())
        is_run = int(host.max()) - first == count - 1
    else:
        first = int(host[0])
        is_run = int(host[-1]) - first == count - 1 and bool((np.diff(host) == 1).all())
    return slice(first, first + count) if is_run else slots


def gather(
    pool: torch.Tensor, slots: slice | torch.Tensor, size: int, dtype: torch.dtype, buffer: torch.Tensor | None = None
) -> torch.Tensor:
    """pool: [slots, kv_heads, items of a row of ``size`` numbers]. Returns [keys, kv_heads, size] of the type dtype. If
    that is the pool's, it is a view of the pool, or of the start of the buffer where there is one."""
    if isinstance(slots, slice):
        return read_rows(pool[slots], size, dtype)
    if buffer is None:
        return read_rows(select_rows(pool, slots), size, dtype)
    return torch.index_select(pool, 0, slots, out=buffer[: len(slots)])


def saves_keys(batch: AttentionBatch, shared: SharedPrefix, reach: Reach) -> bool:
    """Is sharing worthwhile, and does every query see the whole prefix?"""
    sees_all = not reach.first_keys(batch.prefix_lens[shared.first : shared.first + 1]).any()
    return (shared.count - 1) * shared.length >= MIN_SAVED_KEYS and sees_all


def plan_shared(batch: AttentionBatch, shared: SharedPrefix, first_token: int) -> SharedTile:
    """first_token: row of the step's tokens where the group begins."""
    members = slice(shared.first, shared.first + shared.count)
    rows = batch.host_rows[members].astype(np.int64)
    length = int(batch.prefix_lens[shared.first]) + 1
    table_rows = torch.from_numpy(rows).to(batch.req_to_token.device)
    return SharedTile(
        queries=slice(first_token, first_token + shared.count),
        count=shared.count,
        prefix=run_or_index(batch.req_to_token[int(rows[0]), : shared.length], any_order=True),
        prefix_len=shared.length,
        tails=batch.req_to_token[table_rows, shared.length : length].reshape(-1),
        tail_len=length - shared.length,
    )


def attend_shared(
    spec: AttentionSpec,
    tile: SharedTile,
    q: torch.Tensor,
    pools: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor | None],
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend the group's queries and write them to out. q, out: [tokens, num_heads, size of a head]; pools: keys,
    and values unless these are in the keys, [slots, kv_heads, items of a row]; buffers: for ``tile.keys`` of each, or
    None, see `gather`; sinks: see AttentionBackend.run."""
    n, kv_heads, head_dim, group = tile.count, spec.num_kv_heads, spec.head_dim, spec.group
    prefix, tails = [], []
    for pool, size, buffer in zip(pools, (head_dim, spec.value_size), buffers):
        # Compute in float32: half precision would round the scores, which a fused kernel keeps in float32.
        prefix.append(gather(pool, tile.prefix, size, q.dtype, buffer).float().transpose(0, 1))
        rest = None if buffer is None else buffer[tile.prefix_len :]
        own = gather(pool, tile.tails, size, q.dtype, rest).float()
        tails.append(own.view(n, tile.tail_len, *own.shape[1:]).transpose(1, 2))
    if spec.values_in_keys:
        for parts in (prefix, tails):
            parts.append(parts[0][..., : spec.value_size])
    queries = (q[tile.queries].float() * spec.scale).view(n, kv_heads, group, head_dim)
    results = out[tile.queries].view(n, kv_heads, group, spec.value_size)
    at_once = max(1, SCORES // (spec.num_heads * (tile.prefix_len + tile.tail_len)))
    for start in range(0, n, at_once):
        part = slice(start, start + at_once)
        own = queries[part]
        rows = own.transpose(0, 1).reshape(kv_heads, -1, head_dim)
        tail_scores = torch.matmul(own, tails[0][part].transpose(-1, -2)).transpose(0, 1)
        scores = [torch.bmm(rows, prefix[0].transpose(1, 2)), tail_scores.reshape(kv_heads, -1, tile.tail_len)]
        of_rows = None if sinks is None else sinks.view(kv_heads, group).repeat(1, len(own))
        weights = weights_of(capped(torch.cat(scores, -1), spec.logit_cap), of_rows)
        weights, tail_weights = weights.split([tile.prefix_len, tile.tail_len], dim=-1)
        found = torch.bmm(weights, prefix[1]).view(kv_heads, -1, group, spec.value_size).transpose(0, 1)
        tail_weights = tail_weights.reshape(kv_heads, -1, group, tile.tail_len).transpose(0, 1)
        results[part] = found + torch.matmul(tail_weights, tails[1][part])
