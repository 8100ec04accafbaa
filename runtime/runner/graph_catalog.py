"""Lists the step sizes to capture as CUDA graphs, and finds the one a step runs in. Plain arithmetic.

A step is padded to the next size. Small sizes lie close together. Large sizes lie further apart: there, having fewer
graphs is worth more than the padding costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...attention.graph_shape import GraphKind, GraphShape

QUERY_TILE = 64
"""Query rows (queries × heads per KV head) that a kernel should take at a time in short extends. FlashInfer derives its
tile from the longest sequence that a shape allows: tokens - sequences + 1."""

FREE_SEQUENCES = 129
"""A short extend gets up to this many sequences, one of them for padding, even if fewer can run: that keeps its tile
small. Planning them takes the library a quarter of a millisecond."""

MIN_SHARED_ROWS = 64
"""With fewer beams than two searches of 32, reading shared prefixes apart gains nothing."""


def decode_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 up to 64, of 16 up to 128, of 32 up to 256, of 64 beyond; the last is ``largest``."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, largest + 1, 64)]
    return [*(size for size in sizes if size < largest), largest] if largest else []


def extend_sizes(largest: int) -> list[int]:
    """8, 16, 24, 32, then steps of 16 up to 64, of 32 up to 192, of 64 beyond; the last is ``largest``."""
    sizes = [8, 16, 24, *range(32, 64, 16), *range(64, 192, 32), *range(192, largest + 1, 64)]
    return [*(size for size in sizes if size < largest), largest] if largest else []


class GraphCatalog:
    """All graph shapes of one model."""

    def __init__(self, *, max_sequences: int, max_tokens: int, group: int) -> None:
        """max_sequences: rows of the largest decode step that runs as a graph, 0 for no graphs. max_tokens: new tokens
        of the largest extend, 0 for none. group: query heads per KV head."""
        decode = [GraphShape(GraphKind.DECODE, size, size) for size in decode_sizes(max_sequences)]
        shared = [
            GraphShape(GraphKind.SHARED, shape.tokens, shape.sequences)
            for shape in decode
            if shape.tokens >= MIN_SHARED_ROWS and (shape.tokens % 64 == 0 or shape is decode[-1])
        ]
        longest = max(1, QUERY_TILE // group)
        extend = [
            GraphShape(GraphKind.EXTEND, size, min(max(2, size + 1 - longest), max(max_sequences + 1, FREE_SEQUENCES)))
            for size in extend_sizes(max_tokens if max_sequences else 0)
        ]
        self._of_kind = {GraphKind.DECODE: decode, GraphKind.EXTEND: extend, GraphKind.SHARED: shared}

    @classmethod
    def of_tokens(cls, sizes: Sequence[int]) -> GraphCatalog:
        """Steps of just these numbers of tokens, whatever they are of: for backends that plan that in each replay."""
        catalog = cls(max_sequences=0, max_tokens=0, group=1)
        catalog._of_kind[GraphKind.DECODE] = [GraphShape(GraphKind.DECODE, size, size) for size in sorted(sizes)]
        return catalog

    @property
    def largest_first(self) -> list[GraphShape]:
        """The order to capture in, so that the memory that all graphs share gets its full size at once. Extends come
        before others of the same size, since their tiles are larger."""
        shapes = [shape for kind in self._of_kind.values() for shape in kind]
        return sorted(shapes, key=lambda shape: (shape.tokens, shape.kind is GraphKind.EXTEND), reverse=True)

    @property
    def largest_of_each_kind(self) -> list[GraphShape]:
        """The largest shape of each kind, in the same order."""
        largest = {kind: shapes[-1] for kind, shapes in self._of_kind.items() if shapes}
        return [shape for shape in self.largest_first if shape is largest[shape.kind]]

    def find_shape(self, kind: GraphKind, tokens: int, sequences: int) -> GraphShape | None:
        """The smallest shape that holds such a step, or None."""
        for shape in self._of_kind[kind]:
            padding = 1 if kind is GraphKind.EXTEND and tokens < shape.tokens else 0
            if tokens <= shape.tokens and sequences + padding <= shape.sequences:
                return shape
        return None
