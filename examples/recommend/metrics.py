"""Metrics of a ranked list of items, as RecIF-Bench defines them (OpenOneRec technical report, arXiv:2512.24762).

``ranked``: items, best first. ``targets``: the right items, the likeliest first; at least one. An item that does not
exist takes its place in the list, and matches no target.
"""

from __future__ import annotations

from collections.abc import Sequence


def pass_at_k(ranked: Sequence[str], targets: Sequence[str], k: int) -> float:
    """1 if any of the first k items is a target, else 0."""
    return float(not set(targets).isdisjoint(ranked[:k]))


def position1_pass_at_k(ranked: Sequence[str], targets: Sequence[str], k: int) -> float:
    """1 if the first target is among the first k items, else 0."""
    return float(targets[0] in ranked[:k])


def recall_at_k(ranked: Sequence[str], targets: Sequence[str], k: int) -> float:
    """The share of the targets that is among the first k items."""
    wanted = set(targets)
    return len(wanted.intersection(ranked[:k])) / len(wanted)


METRICS = {"pass": pass_at_k, "position1_pass": position1_pass_at_k, "recall": recall_at_k}


def evaluate(lists: Sequence[Sequence[str]], targets: Sequence[Sequence[str]], ks: Sequence[int]) -> dict[str, float]:
    """{"pass@1": …, …}: means over users. lists, targets: one each per user."""
    return {
        f"{name}@{k}": sum(metric(ranked, wanted, k) for ranked, wanted in zip(lists, targets, strict=True))
        / len(lists)
        for name, metric in METRICS.items()
        for k in ks
    }
