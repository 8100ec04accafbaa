"""Cuts what a step attends to into pieces of about equal work.

    decode           one token a sequence, each over keys of its own: short sequences together, a long one in parts
    short extends    tokens of one sequence over the same keys, each up to itself
    beams            a prefix in common, read once for all tokens; then what each has of its own

A piece is over one KV head. Where several pieces see keys of the same tokens, they form a group, and their partial sums
are joined by the largest scores (flash decoding; for a shared prefix: cascade attention, see
`torch_native.SharedTile`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..backend import AttentionBatch, Reach, SharedPrefix

PIECES_PER_THREAD = 8
"""Threads take pieces as they get on, so that one which waits for a core leaves the others more."""

LEAST_WORK = 512
"""Keys × tokens of a piece: about ten microseconds."""

PART_KEYS = 256
"""A sequence is cut at multiples of so many keys."""

TOKENS_AT_ONCE = 64
"""The most tokens of a piece over the same keys: what is summed for them stays in a core's cache."""

PER_TOKEN = 16
"""The cost of a token beside its keys, in keys."""

NO_END = 1 << 40


@dataclass(slots=True)
class Work:
    """All int64, contiguous."""

    pieces: np.ndarray
    """[n, 8]: first token, token behind the last, first key, key behind the last (positions in a row of req_to_token),
    KV head, 1 if each token has keys of its own or 0 if all have the first one's, place in the memory for partial sums
    in tokens or −1, group or −1."""
    groups: np.ndarray
    """[g, 4]: first piece, piece behind the last, first token, token behind the last."""
    rows: np.ndarray
    """[tokens]: row of req_to_token. (Where a token counts as several, these are the tokens here.)"""
    begins: np.ndarray
    """[tokens]: the first key that a token sees."""
    ends: np.ndarray
    """[tokens]: behind the last one."""
    partial_tokens: int
    """Tokens that the memory for partial sums has to hold."""
    cost: int
    """Keys × tokens, over all KV heads."""


@dataclass(slots=True)
class _Part:
    """A piece before it is given a head. ``own`` as in `Work.pieces`."""

    first: int
    last: int
    low: int
    high: int
    own: bool
    cost: int


def cut(
    batch: AttentionBatch,
    members: np.ndarray,
    shared: list[SharedPrefix],
    reach: Reach,
    kv_heads: int,
    threads: int,
    parts: int = 1,
) -> Work:
    """members: bool [bs], the sequences that are attended; those of ``shared`` are among them.

    parts: each token counts as so many tokens that see the same keys. So many heads over one KV head (latent attention
    has up to 128) are attended a few at a time, while a block of keys stays in a core's cache.
    """
    is_decode = len(members) == batch.extend_lens.sum() and members.all() and batch.extend_lens.all()
    if not shared and is_decode and parts == 1:
        return _cut_decode(batch, reach, kv_heads, threads)
    new = batch.extend_lens.astype(np.int64) * parts
    first_token = np.cumsum(new) - new
    sequence = np.repeat(np.arange(len(new)), new)
    position = (np.arange(len(sequence)) - first_token[sequence]) // parts
    ends = batch.prefix_lens.astype(np.int64)[sequence] + position + 1
    begins = reach.first_keys(ends - 1)
    rows = batch.host_rows.astype(np.int64)[sequence]
    work = Work(np.empty((0, 8), np.int64), np.empty((0, 4), np.int64), rows, begins, ends, 0, 0)
    in_group = np.zeros(len(new), dtype=bool)
    for group in shared:
        in_group[group.first : group.first + group.count] = True
    alone = members & ~in_group & (new > 0)
    seen = np.where(members[sequence], ends - begins + PER_TOKEN, 0)
    work.cost = int(seen.sum()) * kv_heads
    target = _target(work, threads)
    plain, groups = _decodes(work, first_token[alone & (new == 1)], target)
    for row in np.flatnonzero(alone & (new > 1)).tolist():
        for first in range(int(first_token[row]), int(first_token[row] + new[row]), TOKENS_AT_ONCE):
            last = min(first + TOKENS_AT_ONCE, int(first_token[row] + new[row]))
            pieces = _in_parts(work, first, last, int(begins[first]), int(ends[last - 1]), target)
            if len(pieces) == 1:
                plain += pieces
            else:
                groups.append(pieces)
    for group in shared:
        groups.append(_of_beams(work, group, int(first_token[group.first]), group.count * parts, target))
    _give_heads(work, plain, groups, kv_heads)
    return work


def _cut_decode(batch: AttentionBatch, reach: Reach, kv_heads: int, threads: int) -> Work:
    """As `cut`, for a step in which all sequences have one token: nearly all steps."""
    rows, ends = batch.host_rows.astype(np.int64), batch.prefix_lens.astype(np.int64) + 1
    begins = reach.first_keys(ends - 1)
    work = Work(np.empty((0, 8), np.int64), np.empty((0, 4), np.int64), rows, begins, ends, 0, 0)
    work.cost = int((ends - begins).sum() + PER_TOKEN * len(rows)) * kv_heads
    target = _target(work, threads)
    if work.cost <= target:
        plain, groups = [_Part(0, len(rows), 0, NO_END, True, work.cost)] if len(rows) else [], []
    else:
        plain, groups = _decodes(work, np.arange(len(rows)), target)
    _give_heads(work, plain, groups, kv_heads)
    return work


def _target(work: Work, threads: int) -> int:
    """How much work a piece should be."""
    return max(work.cost // (threads * PIECES_PER_THREAD), LEAST_WORK) if threads > 1 else NO_END


def _decodes(work: Work, tokens: np.ndarray, target: int) -> tuple[list[_Part], list[list[_Part]]]:
    """Neighbours together until they are enough work; those that are far too much, in parts."""
    costs = work.ends[tokens] - work.begins[tokens] + PER_TOKEN
    plain: list[_Part] = []
    groups: list[list[_Part]] = []
    is_long = costs > 2 * target
    for token in tokens[is_long].tolist():
        groups.append(_in_parts(work, token, token + 1, int(work.begins[token]), int(work.ends[token]), target))
    tokens, costs = tokens[~is_long], costs[~is_long]
    if len(tokens):
        number = (np.cumsum(costs) - costs) // target
        starts = np.flatnonzero((np.diff(number, prepend=-1) != 0) | (np.diff(tokens, prepend=-2) != 1))
        stops = np.append(starts[1:], len(tokens))
        totals = np.add.reduceat(costs, starts)
        for start, stop, cost in zip(starts.tolist(), stops.tolist(), totals.tolist()):
            plain.append(_Part(int(tokens[start]), int(tokens[stop - 1]) + 1, 0, NO_END, True, cost))
    return plain, groups


def _in_parts(work: Work, first: int, last: int, low: int, high: int, target: int) -> list[_Part]:
    """Tokens over the same keys, cut along the keys where that is too much for one piece."""
    tokens, keys = last - first, high - low
    if keys <= 0:  # a window or chunk that has left a shared prefix behind
        return []
    count = min(max(1, tokens * keys // target), -(-keys // PART_KEYS)) if tokens * keys > 2 * target else 1
    size = -(-keys // (count * PART_KEYS)) * PART_KEYS if count > 1 else keys
    bounds = [*range(low, high, size), high]
    return [_Part(first, last, low, high, False, tokens * (high - low)) for low, high in pairwise(bounds)]


def _of_beams(work: Work, group: SharedPrefix, first: int, count: int, target: int) -> list[_Part]:
    """first, count: the group's tokens."""
    last = first + count
    parts = []
    for start in range(first, last, TOKENS_AT_ONCE):
        stop = min(start + TOKENS_AT_ONCE, last)
        parts += _in_parts(work, start, stop, int(work.begins[start]), group.length, target)
    tail = int(work.ends[first]) - group.length + PER_TOKEN
    step = max(1, min(count, target // tail))
    for start in range(first, last, step):
        stop = min(start + step, last)
        parts.append(_Part(start, stop, group.length, NO_END, True, (stop - start) * tail))
    return parts


def _give_heads(work: Work, plain: list[_Part], groups: list[list[_Part]], kv_heads: int) -> None:
    """Turn parts into pieces, and fill in ``work``."""
    heads = np.arange(kv_heads, dtype=np.int64)
    rows = [(p.first, p.last, p.low, p.high, 0, int(p.own), -1, -1) for p in plain]
    pieces = [np.repeat(np.array(rows, dtype=np.int64).reshape(-1, 8), kv_heads, axis=0)]
    pieces[0][:, 4] = np.tile(heads, len(rows))
    entries, at, partial = [], len(pieces[0]), 0
    for parts in groups:
        first, last = min(part.first for part in parts), max(part.last for part in parts)
        for head in range(kv_heads):
            own = np.empty((len(parts), 8), dtype=np.int64)
            for number, part in enumerate(parts):
                own[number] = (part.first, part.last, part.low, part.high, head, int(part.own), partial, len(entries))
                partial += part.last - part.first
            pieces.append(own)
            entries.append((at, at + len(parts), first, last))
            at += len(parts)
    work.pieces = np.ascontiguousarray(np.concatenate(pieces))
    work.groups = np.array(entries, dtype=np.int64).reshape(-1, 4)
    work.partial_tokens = partial
