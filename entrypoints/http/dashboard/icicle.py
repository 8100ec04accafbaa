"""A snapshot of the tree as an icicle plot (after Kruskal and Landwehr) with a limited number of spans.

The plot shows the nodes with the most tokens in and below them. They are connected, as a node has at least as many as
its child. The remaining children of a shown node are collapsed into one span.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

import numpy as np

from ....radix.snapshot import HEAD_TOKENS, MANY, Has
from ....runtime.live_reports.snapshot import Snapshot

MAX_SPANS = 2000

MAX_HEADS = 200
"""Namespaces that are shown apart at the top; the smaller ones share one span."""

_LETTERS = tuple(
    (bit.value, letter)
    for bit, letter in (
        (Has.LOCK, "L"),
        (Has.LEASE, "S"),
        (Has.LOADING, "I"),
        (Has.STORING, "O"),
        (Has.RETIRED, "R"),
        (Has.STATE, "T"),
    )
)

_HOST_ONLY = 1 << 16
"""A further bit beside those of `Has`: the node is not on the device."""

_TOP_GROUPS = -(1 << 40)
"""Ids of groups without a parent begin here; ids of other groups follow from the parent's serial."""


class Span(NamedTuple):
    """One rectangle; sent to the page as a list."""

    id: int
    """A node's serial, or a negative number for a collapsed group."""
    parent: int
    """Index into the spans; -1 at the top."""
    start: int
    tokens: int
    subtree: int
    nodes: int
    """1, or the number of siblings that it stands for, with all nodes below them."""
    tier: str
    flags: str
    idle: float
    uses: int
    namespace: str | None
    text: str | None


class _Groups(NamedTuple):
    """Groups of siblings, each shown as one span."""

    rows: np.ndarray
    """int64 [members]: rows of the members, group after group."""
    begins: np.ndarray
    """int64 [groups]: start of each group in ``rows``."""


def icicle(snapshot: Snapshot, decode: Callable[[np.ndarray], str] | None, most: int = MAX_SPANS) -> list[Span]:
    """Spans with parents before children and siblings by size, the largest first. decode: makes text of a node's first
    token ids (int32); None if clients may not read texts."""
    if not len(snapshot.rows):
        return []
    shown, groups = _collapse(snapshot, most)
    found = _node_spans(snapshot, shown, decode) + _group_spans(snapshot, groups)
    return _in_order(found)


# -- selection -----------------------------------------------------------------------------------------------------


def _collapse(snapshot: Snapshot, most: int) -> tuple[np.ndarray, _Groups]:
    """(the rows that are shown, the groups of the others)."""
    parents, heads = snapshot.rows["parent"].astype(np.int64), _heads(snapshot)
    count = len(parents)
    if count <= most:
        none = np.empty(0, dtype=np.int64)
        return np.arange(count), _Groups(none, none)
    place = np.empty(count, dtype=np.int64)
    place[np.argsort(-snapshot.subtree_tokens, kind="stable")] = np.arange(count)
    low, high = 0, most  # as many nodes as leave room for their groups
    while low < high:
        middle = (low + high + 1) // 2
        is_hung_on = np.zeros(count + MAX_HEADS + 1, dtype=bool)
        is_hung_on[_hang_on(_cut(place < middle, parents), parents, heads)] = True
        if middle + np.count_nonzero(is_hung_on) <= most:
            low = middle
        else:
            high = middle - 1
    shown = place < low
    cut = _cut(shown, parents)
    _, which, sizes = np.unique(_hang_on(cut, parents, heads), return_inverse=True, return_counts=True)
    alone = sizes[which] == 1  # shown as itself
    shown[cut[alone]] = True
    cut, which, sizes = cut[~alone], which[~alone], sizes[sizes > 1]
    rows = cut[np.argsort(which, kind="stable")]
    return np.flatnonzero(shown), _Groups(rows, np.cumsum(sizes) - sizes)


def _cut(shown: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """The hidden rows with a shown parent, or with none."""
    return np.flatnonzero(~shown & ((parents < 0) | shown[parents]))


def _hang_on(rows: np.ndarray, parents: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """The owner of each row: its parent's row, or at the top its namespace, counted backwards from -1."""
    return np.where(parents[rows] >= 0, parents[rows], -1 - heads[rows])


def _heads(snapshot: Snapshot) -> np.ndarray:
    """int64 [nodes]: a number for each namespace, by its size; 0 for those beyond `MAX_HEADS`."""
    top = snapshot.rows["parent"] < 0
    kinds, which = np.unique(snapshot.rows["namespace"], return_inverse=True)
    sizes = np.bincount(which[top], weights=snapshot.subtree_tokens[top], minlength=len(kinds))
    numbers = np.zeros(len(kinds), dtype=np.int64)
    largest = np.argsort(-sizes, kind="stable")[:MAX_HEADS]
    numbers[largest] = 1 + np.arange(len(largest))
    numbers[kinds == MANY] = 0
    return numbers[which]


# -- spans ----------------------------------------------------------------------------------------------------

_Found = tuple[int, int, Span]
"""(row or -1 for a group, the parent's row or -1 for none, the span, still without ``parent``)."""


def _node_spans(snapshot: Snapshot, shown: np.ndarray, decode: Callable[[np.ndarray], str] | None) -> list[_Found]:
    rows = snapshot.rows[shown]
    names = ("serial", "parent", "start", "tokens", "namespace", "has")
    columns = [rows[name].tolist() for name in names]
    columns += [values[shown].tolist() for values in (snapshot.subtree_tokens, snapshot.idle.round(3), snapshot.uses)]
    found: list[_Found] = []
    for row, (serial, parent, start, tokens, namespace, has, subtree, idle, uses) in zip(
        shown.tolist(), zip(*columns, strict=True), strict=True
    ):
        tier = "device" if has & Has.DEVICE.value else "host"
        name = snapshot.namespace(namespace) if parent < 0 else None
        text = _text(snapshot, row, tokens, decode)
        span = Span(serial, -1, start, tokens, subtree, 1, tier, _flags(has), idle, uses, name, text)
        found.append((row, parent, span))
    return found


def _text(snapshot: Snapshot, row: int, tokens: int, decode: Callable[[np.ndarray], str] | None) -> str | None:
    if decode is None or not len(snapshot.heads):
        return None
    return decode(snapshot.head(row)) + ("…" if tokens > HEAD_TOKENS else "")


def _group_spans(snapshot: Snapshot, groups: _Groups) -> list[_Found]:
    rows, begins = groups
    if not len(rows):
        return []
    has = snapshot.rows["has"].astype(np.int64)
    has = np.where(has & Has.DEVICE.value, has, has | _HOST_ONLY)
    blocks = np.stack([rows, snapshot.ends[rows]], axis=1).ravel()  # what is below a member counts, too
    has = np.bitwise_or.reduceat(np.bitwise_or.reduceat(np.append(has, 0), blocks)[::2], begins)
    firsts = snapshot.rows[rows[begins]]
    serials = np.where(firsts["parent"] >= 0, snapshot.rows["serial"][firsts["parent"]], 0)
    names = snapshot.rows["namespace"][rows]
    told_apart = np.minimum.reduceat(names, begins) == np.maximum.reduceat(names, begins)
    columns = (
        firsts["parent"],
        serials,
        np.minimum.reduceat(snapshot.rows["start"][rows], begins),
        np.add.reduceat(snapshot.subtree_tokens[rows], begins),
        np.diff(np.append(begins, len(rows))),
        has,
        np.minimum.reduceat(snapshot.idle[rows], begins).round(3),
        np.add.reduceat(snapshot.uses[rows], begins),
        np.where(told_apart, firsts["namespace"], MANY),
    )
    found: list[_Found] = []
    for parent, serial, start, subtree, count, bits, idle, uses, number in zip(*(c.tolist() for c in columns)):
        name = snapshot.namespace(number) if parent < 0 else None
        own = -1 - serial if name is None else _TOP_GROUPS - crc32(name.encode())
        tier = "mixed" if bits & Has.DEVICE.value and bits & _HOST_ONLY else "host" if bits & _HOST_ONLY else "device"
        span = Span(own, -1, start, subtree, subtree, count, tier, _flags(bits), idle, uses, name, None)
        found.append((-1, parent, span))
    return found


def _flags(has: int) -> str:
    return "".join(letter for bit, letter in _LETTERS if has & bit)


def _in_order(found: list[_Found]) -> list[Span]:
    below: dict[int, list[tuple[int, Span]]] = {}
    for row, parent, span in found:
        below.setdefault(parent, []).append((row, span))
    for siblings in below.values():
        siblings.sort(key=lambda each: -each[1].subtree)
        siblings.reverse()  # they are taken from the end
    spans: list[Span] = []
    open_ = [(-1, each) for each in below.get(-1, ())]
    while open_:
        parent, (row, span) = open_.pop()
        if row >= 0:
            open_ += [(len(spans), each) for each in below.get(row, ())]
        spans.append(span._replace(parent=parent))
    return spans
