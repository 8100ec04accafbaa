"""What follows from the rows of a walk, compared with the slow way."""

from __future__ import annotations

import random

import msgspec
import pytest

from baton.radix.snapshot import HEAD_TOKENS, HIDDEN, MANY
from baton.runtime.live_reports.snapshot import HIDDEN_NAME, MANY_NAME, SnapshotBuilder
from baton.runtime.messages import TreeRows
from tests.doubles.tree_snapshots import below, random_snapshot, snapshot_of

SHAPES = pytest.mark.parametrize("shape", ["bushy", "deep", "flat"])


@SHAPES
@pytest.mark.parametrize("seed", range(4))
def test_snapshot_sums_and_times_match_slow_twin(seed: int, shape: str) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    snapshot = random_snapshot(rng, rng.choice([1, 2, 60, 200]), shape)
    rows = snapshot.rows
    for row in range(len(rows)):
        block = below(snapshot, row)
        assert block == [*range(row, snapshot.ends[row])]
        assert snapshot.subtree_tokens[row] == rows["tokens"][block].sum()
        assert snapshot.uses[row] == rows["uses"][block].sum()
        assert snapshot.idle[row] == pytest.approx(1000 - rows["used"][block].max())
        assert snapshot.head(row).tolist() == [rows["serial"][row]] * min(HEAD_TOKENS, rows["tokens"][row])
    assert snapshot.num_tokens == rows["tokens"].sum()


def test_an_empty_tree() -> None:
    snapshot = snapshot_of([])
    assert len(snapshot.ends) == len(snapshot.subtree_tokens) == len(snapshot.idle) == 0 == snapshot.num_tokens


def test_names() -> None:
    snapshot = snapshot_of([-1], names=["", "red"])
    assert [*map(snapshot.namespace, (0, 1, HIDDEN, MANY))] == ["", "red", HIDDEN_NAME, MANY_NAME]


def test_idle_time_is_zero_without_known_times() -> None:
    snapshot = snapshot_of([-1], used=[5])
    snapshot.end = msgspec.structs.replace(snapshot.end, ticks=b"", seconds=b"")
    assert snapshot.idle.tolist() == [0.0]


def test_snapshot_is_built_from_several_messages() -> None:
    whole = snapshot_of([-1, 0, 1, 1, -1], names=["", "red"])
    data, builder = whole.rows.tobytes(), SnapshotBuilder()
    row = whole.rows.itemsize
    assert builder.add_rows(TreeRows(is_first=True, rows=data[:row])) is None, "of a walk that was given up"
    assert builder.add_rows(TreeRows(is_first=True, rows=data[: 2 * row], heads=b"\1\0\0\0", names=("",))) is None
    assert builder.add_rows(TreeRows(is_first=False, rows=b"")) is None
    built = builder.add_rows(TreeRows(is_first=False, rows=data[2 * row :], names=("red",), end=whole.end))
    assert built is not None and built.rows.tobytes() == data and built.names == ["", "red"] and len(built.heads) == 1
    again = builder.add_rows(TreeRows(is_first=True, rows=data[:row], end=whole.end))
    assert again is not None and len(again.rows) == 1 and again.names == [] and again.id != built.id
