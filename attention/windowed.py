"""Attention of a model that keeps the K and V of layers with a sliding window in a second pool: two backends in one.

Layers that see all tokens are attended over ``req_to_token``, those that see the last ones over ``req_to_window``: the
same rows and positions, with the slots of the other pool. A backend knows of one table only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from .backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    GraphAttention,
    GraphBackend,
    GraphKind,
    GraphShape,
)


def window_layers(specs: Sequence[AttentionSpec]) -> tuple[int, frozenset[int]]:
    """Returns (the tokens that a layer with a window sees at most, the pool's layers that have one). (0, none) where no
    layer has a window, or where one shares its K and V with a layer that sees all tokens."""
    windows = {spec.layer_id: spec.reach.most for spec in specs if spec.reach.most is not None}
    if any(spec.layer_id in windows and spec.reach.most is None for spec in specs):
        return 0, frozenset()
    return max((spec.reach.most or 0 for spec in specs), default=0), frozenset(windows)


def open_windowed(
    open_backend: Callable[[Sequence[AttentionSpec]], AttentionBackend],
    specs: Sequence[AttentionSpec],
    layers: frozenset[int],
) -> AttentionBackend:
    """The attention of a model. layers: those of the pool with a window. open_backend: makes the backend of the layers
    that it is given."""
    full = [spec for spec in specs if spec.layer_id not in layers]
    windows = [spec for spec in specs if spec.layer_id in layers]
    parts = open_backend(full) if full else None, open_backend(windows)
    can_capture = all(part is None or isinstance(part, GraphBackend) for part in parts)
    return (WindowedGraphBackend if can_capture else WindowedBackend)(*parts, layers)


class WindowedBackend:
    """AttentionBackend over a `WindowedKVPool`."""

    name: ClassVar[str] = "windowed"

    def __init__(self, full: AttentionBackend | None, windows: AttentionBackend, layers: frozenset[int]) -> None:
        """full: None if all layers have a window. layers: the pool's layers with one."""
        self._full, self.inner, self._layers = full, windows, layers

    def plan(self, batch: AttentionBatch) -> None:
        """See AttentionBackend.plan."""
        if self._full is not None:
            self._full.plan(batch)
        self.inner.plan(_over_windows(batch))

    def run(self, spec: AttentionSpec, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionBackend.run."""
        part = self.inner if spec.layer_id in self._layers else self._full
        assert part is not None
        return part.run(spec, q, sinks)


class WindowedGraphBackend(WindowedBackend):
    """GraphBackend of two that are."""

    @property
    def _parts(self) -> list[GraphBackend]:
        return [part for part in (self._full, self.inner) if isinstance(part, GraphBackend)]

    def graph_kind(self, batch: AttentionBatch) -> GraphKind:
        """See GraphBackend.graph_kind: both are of one kind, and see the same step."""
        return self._parts[0].graph_kind(batch)

    def fits_graph(self, batch: AttentionBatch, shape: GraphShape) -> bool:
        """See GraphBackend.fits_graph."""
        return all(part.fits_graph(batch, shape) for part in self._parts)

    def open_graph(self, shape: GraphShape) -> WindowedGraph:
        """See GraphBackend.open_graph."""
        opened = [part.open_graph(shape) for part in self._parts]
        return WindowedGraph(opened[0] if len(opened) > 1 else None, opened[-1], self._layers)


class WindowedGraph(WindowedBackend):
    """GraphAttention of two."""

    def __init__(self, full: GraphAttention | None, windows: GraphAttention, layers: frozenset[int]) -> None:
        super().__init__(full, windows, layers)
        self._graphs = [part for part in (full, windows) if part is not None]

    def freeze(self) -> None:
        """See GraphAttention.freeze."""
        for part in self._graphs:
            part.freeze()


def _over_windows(batch: AttentionBatch) -> AttentionBatch:
    assert batch.req_to_window is not None, "a step of a model with windows must say where they are"
    return replace(batch, req_to_token=batch.req_to_window)
