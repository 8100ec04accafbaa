"""A tree as a picture: small enough, and true."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.entrypoints.http.dashboard.icicle import MAX_HEADS, MAX_SPANS, Span, icicle
from baton.radix.snapshot import MANY, Has
from baton.runtime.live_reports.snapshot import HIDDEN_NAME, MANY_NAME, Snapshot
from tests.doubles.tree_snapshots import below, random_snapshot, snapshot_of

SHAPES = pytest.mark.parametrize("shape", ["bushy", "deep", "flat"])


def numbers(ids: np.ndarray) -> str:
    return " ".join(map(str, ids.tolist()))


def check(snapshot: Snapshot, spans: list[Span], most: int) -> None:
    """Every node is in exactly one span, and the spans say what is in them."""
    assert len(spans) <= most and len({span.id for span in spans}) == len(spans)
    row_of = {serial: row for row, serial in enumerate(snapshot.rows["serial"].tolist())}
    assert sum(span.subtree for span in spans if span.parent < 0) == snapshot.num_tokens
    sizes: dict[int, list[int]] = {}
    told: list[int] = []
    for place, span in enumerate(spans):
        assert span.parent < place
        sizes.setdefault(span.parent, []).append(span.subtree)
        above = -1 if span.parent < 0 else row_of[spans[span.parent].id]
        assert (span.namespace is None) == (span.parent >= 0)
        if span.id >= 0:
            row = row_of[span.id]
            rows = below(snapshot, row)
            told.append(row)
            node = snapshot.rows[row]
            assert above == node["parent"] and (span.start, span.tokens) == (node["start"], node["tokens"])
            assert span.nodes == 1 and span.tier == ("device" if node["has"] & Has.DEVICE else "host")
            flags = int(node["has"])
        else:
            inside = [spans[other].id for other in range(len(spans)) if spans[other].parent == span.parent]
            alike = np.flatnonzero(snapshot.rows["parent"] == above)
            members = [row for row in alike.tolist() if int(snapshot.rows["serial"][row]) not in inside]
            if above < 0:
                members = [r for r in members if snapshot.namespace(snapshot.rows["namespace"][r]) == span.namespace]
            assert span.nodes == len(members) > 1 and span.text is None
            rows = [row for member in members for row in below(snapshot, member)]
            told += rows
            kinds = {bool(has & Has.DEVICE) for has in snapshot.rows["has"][rows].tolist()}
            assert span.tier == ("mixed" if len(kinds) == 2 else "device" if kinds == {True} else "host")
            assert span.tokens == span.subtree and span.start == snapshot.rows["start"][members].min()
            flags = int(np.bitwise_or.reduce(snapshot.rows["has"][rows]))
        assert span.subtree == snapshot.rows["tokens"][rows].sum() and span.uses == snapshot.rows["uses"][rows].sum()
        assert span.idle == pytest.approx(1000 - snapshot.rows["used"][rows].max())
        letters = {"L": Has.LOCK, "S": Has.LEASE, "I": Has.LOADING, "O": Has.STORING, "R": Has.RETIRED}
        assert span.flags == "".join(letter for letter, bit in letters.items() if flags & bit)
    assert all(found == sorted(found, reverse=True) for found in sizes.values()), "siblings by their size"
    parents = {span.parent for span in spans}
    lowest = [span.id for place, span in enumerate(spans) if span.id >= 0 and place not in parents]
    told += [row for id in lowest for row in below(snapshot, row_of[id])[1:]]  # one that was alone in its group
    assert sorted(told) == [*range(len(snapshot.rows))]


@SHAPES
@pytest.mark.parametrize("seed", range(5))
def test_icicle_of_random_trees_is_bounded_and_consistent(seed: int, shape: str) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    snapshot = random_snapshot(rng, rng.choice([60, 150, 300]), shape)
    most = rng.choice([8, 20, 50])
    spans = icicle(snapshot, numbers, most)
    assert shape == "deep" or any(span.id < 0 for span in spans)
    check(snapshot, spans, most)


def test_small_tree_is_shown_completely() -> None:
    snapshot = random_snapshot(random.Random(3), 100, "bushy")
    spans = icicle(snapshot, numbers)
    assert {span.id for span in spans} == {*snapshot.rows["serial"].tolist()}
    check(snapshot, spans, MAX_SPANS)


def test_an_empty_tree() -> None:
    assert icicle(snapshot_of([]), None) == []


def test_largest_spans_are_shown_and_others_collapsed() -> None:
    tokens = [100, 50, 1, 2, 3, 9]
    snapshot = snapshot_of([-1, 0, 0, 0, 0, -1], tokens=tokens, has=[1, 5, 1, 2, 9, 1], used=[0, 0, 7, 0, 3, 0])
    assert [tuple(span) for span in icicle(snapshot, None, 4)] == [
        (10, -1, 0, 100, 156, 1, "device", "", 993.0, 0, "", None),
        (11, 0, 100, 50, 50, 1, "device", "L", 1000.0, 0, None, None),
        (-11, 0, 100, 6, 6, 3, "mixed", "S", 993.0, 0, None, None),
        (15, -1, 0, 9, 9, 1, "device", "", 1000.0, 0, "", None),
    ]


def test_collapsed_group_keeps_its_id_across_snapshots() -> None:
    """From snapshot to snapshot, so that a page can follow it."""
    ids = []
    for extra in (0, 3):
        parents = [-1, *[0] * (30 + extra), *[-1] * 40]
        spans = icicle(snapshot_of(parents, tokens=[5] * len(parents)), None, 12)
        ids.append(sorted(span.id for span in spans if span.id < 0))
    assert ids[0] == ids[1] and len(ids[0]) == 2


def test_span_text_is_decoded_and_truncated() -> None:
    snapshot = snapshot_of([-1, 0], tokens=[3, 17])
    assert [span.text for span in icicle(snapshot, numbers)] == ["10 10 10", " ".join(["11"] * 16) + "…"]
    assert [span.text for span in icicle(snapshot, None)] == [None, None]
    snapshot.heads = snapshot.heads[:0]
    assert [span.text for span in icicle(snapshot, numbers)] == [None, None], "nobody asked the worker"


def test_namespaces_share_the_top_level() -> None:
    parents = [-1] * 60
    names = [f"n{number}" for number in range(3)]
    namespaces = [number % 3 for number in range(58)] + [-2, -3]
    spans = icicle(snapshot_of(parents, namespaces=namespaces, names=names), None, 10)
    assert {span.namespace for span in spans} == {"n0", "n1", "n2", MANY_NAME, HIDDEN_NAME}
    assert sum(span.nodes for span in spans) == 60


def test_excess_namespaces_are_collapsed_into_one() -> None:
    count = 10 * MAX_HEADS
    names = [f"n{number}" for number in range(count)]
    namespaces = [*range(count)] * 2 + [MANY] * 100
    snapshot = snapshot_of([-1] * len(namespaces), namespaces=namespaces, names=names)
    spans = icicle(snapshot, None, MAX_HEADS + 50)
    assert len(spans) <= MAX_HEADS + 50 and sum(span.nodes for span in spans) == len(namespaces)
    assert sum(span.namespace == MANY_NAME for span in spans) == 1
