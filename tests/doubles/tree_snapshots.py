"""Snapshots of trees that never were: rows from a list of parents."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from baton.radix.snapshot import HEAD_TOKENS, HIDDEN, MANY, ROW, Has
from baton.runtime.live_reports.snapshot import Snapshot
from baton.runtime.messages import WalkEnd


def snapshot_of(
    parents: Sequence[int],
    *,
    tokens: Sequence[int] | None = None,
    has: Sequence[int] | None = None,
    namespaces: Sequence[int] | None = None,
    uses: Sequence[int] | None = None,
    used: Sequence[int] | None = None,
    names: Sequence[str] = ("",),
) -> Snapshot:
    """parents: of each node, in preorder; -1 at the top. Tick t was t seconds after the start, and now is 1000. The
    serial of row r is 10 + r, and its first ids are its serial."""
    rows = np.zeros(len(parents), dtype=ROW)
    rows["serial"] = 10 + np.arange(len(parents))
    rows["parent"] = parents
    rows["tokens"] = 1 if tokens is None else tokens
    rows["has"] = Has.DEVICE.value if has is None else has
    rows["namespace"] = 0 if namespaces is None else namespaces
    rows["uses"] = 0 if uses is None else uses
    rows["used"] = 0 if used is None else used
    for row, parent in enumerate(parents):
        rows["start"][row] = 0 if parent < 0 else rows["start"][parent] + rows["tokens"][parent]
    heads = np.repeat(rows["serial"], np.minimum(rows["tokens"], HEAD_TOKENS)).astype(np.int32)
    ticks, seconds = np.arange(-1, 1000), np.arange(1001.0)  # tick 0 was the first one after -1
    end = WalkEnd(
        began=999.0, ended=1000.0, complete=True, ticks=ticks.tobytes(), seconds=seconds.tobytes(), ended_at=1000.0
    )
    return Snapshot("0123", rows, heads, [*names], end)


def random_parents(rng: random.Random, count: int, shape: str) -> list[int]:
    """In preorder. shape: bushy, deep, or flat."""
    path, parents = [-1], []
    for row in range(count):
        up = {"bushy": rng.randrange(3), "deep": int(rng.random() < 0.02), "flat": rng.choice([0, 9])}[shape]
        del path[max(1, len(path) - up) :]
        parents.append(path[-1])
        path.append(row)
    return parents


def random_snapshot(rng: random.Random, count: int, shape: str) -> Snapshot:
    parents = random_parents(rng, count, shape)
    namespaces: list[int] = []
    for parent in parents:
        namespaces.append(rng.choice([MANY, HIDDEN, 0, 1, 2]) if parent < 0 else namespaces[parent])
    return snapshot_of(
        parents,
        tokens=[rng.choice([1, 2, 30, 400]) for _ in parents],
        has=[rng.choice([1] * 9 + [2, 3]) | rng.choice([0] * 50 + [4, 12, 16, 32, 64]) for _ in parents],
        namespaces=namespaces,
        uses=[rng.randrange(5) for _ in parents],
        used=[rng.randrange(1000) for _ in parents],
        names=["", "red", "blue"],
    )


def below(snapshot: Snapshot, row: int) -> list[int]:
    """The rows of a node and of all below it, the slow way."""
    found, parents = [row], snapshot.rows["parent"].tolist()
    for other in range(row + 1, len(parents)):
        if parents[other] in found:
            found.append(other)
    return found
