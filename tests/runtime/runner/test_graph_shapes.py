"""Which graph a step runs in."""

from __future__ import annotations

from itertools import pairwise

import pytest

from baton.attention.backend import GraphKind
from baton.runtime.runner.cuda_graph import GraphCatalog, decode_sizes, extend_sizes


@pytest.mark.parametrize("sizes", [decode_sizes, extend_sizes])
@pytest.mark.parametrize("largest", [1, 2, 3, 8, 64, 100, 512, 1000])
def test_graph_sizes_rise_to_the_largest(sizes, largest):
    found = sizes(largest)
    assert found == sorted(set(found)) and found[-1] == largest
    assert all(below < size for below, size in pairwise(found))
    assert all(size - below <= max(below, 8) for below, size in pairwise(found)), "at most twice the work"
    assert sizes(0) == []


@pytest.mark.parametrize("group", [1, 4, 8, 128])
@pytest.mark.parametrize("max_sequences, max_tokens", [(64, 512), (1, 8), (512, 512), (3, 100)])
def test_find_shape_returns_fitting_graph_shape(max_sequences, max_tokens, group):
    shapes = GraphCatalog(max_sequences=max_sequences, max_tokens=max_tokens, group=group)
    for rows in range(1, max_sequences + 1):
        shape = shapes.find_shape(GraphKind.DECODE, rows, rows)
        assert shape is not None and shape.tokens == shape.sequences >= rows
    assert shapes.find_shape(GraphKind.DECODE, max_sequences + 1, max_sequences + 1) is None
    for sequences in range(1, max_sequences + 1):
        for tokens in range(sequences, max_tokens + 1, 7):
            shape = shapes.find_shape(GraphKind.EXTEND, tokens, sequences)
            if shape is not None:
                assert shape.tokens >= tokens
                assert shape.sequences - sequences >= (1 if shape.tokens > tokens else 0), "what pads is a sequence"
    assert shapes.find_shape(GraphKind.EXTEND, max_tokens + 1, 1) is None


def test_continuation_suffixes_fit_a_graph():
    """8B shape, four heads per KV head: from one request to 64, with 2 to 8 tokens each."""
    shapes = GraphCatalog(max_sequences=64, max_tokens=512, group=4)
    for sequences in (1, 2, 16, 63, 64):
        for each in (2, 3, 4, 5, 8):
            shape = shapes.find_shape(GraphKind.EXTEND, sequences * each, sequences)
            assert shape is not None and shape.tokens <= max(24, 2 * sequences * each)


def test_extend_shapes_leave_a_small_query_tile():
    """What a shape leaves for its longest sequence, in query rows, decides about the kernel's tile."""
    shapes = GraphCatalog(max_sequences=512, max_tokens=512, group=4)
    for shape in shapes.largest_first:
        if shape.kind is GraphKind.EXTEND and shape.tokens >= 24:
            assert (shape.tokens - shape.sequences + 1) * 4 <= 64
    few = GraphCatalog(max_sequences=16, max_tokens=512, group=4)
    shape = few.find_shape(GraphKind.EXTEND, 128, 16)
    assert shape is not None and shape.sequences == 113, "more than can run: padding is free"


def test_graph_sizes_for_beams():
    shapes = GraphCatalog(max_sequences=512, max_tokens=512, group=4)
    sizes = [shape.tokens for shape in shapes.largest_first if shape.kind is GraphKind.SHARED]
    assert sizes == [512, 448, 384, 320, 256, 192, 128, 64]
    few = GraphCatalog(max_sequences=48, max_tokens=512, group=4)
    assert few.find_shape(GraphKind.SHARED, 32, 32) is None


def test_largest_graph_is_captured_first():
    shapes = GraphCatalog(max_sequences=64, max_tokens=256, group=4).largest_first
    assert [shape.tokens for shape in shapes] == sorted((shape.tokens for shape in shapes), reverse=True)


def test_largest_graph_of_each_kind():
    largest = GraphCatalog(max_sequences=512, max_tokens=512, group=4).largest_of_each_kind
    assert [(shape.kind, shape.tokens) for shape in largest] == [
        (GraphKind.EXTEND, 512),
        (GraphKind.DECODE, 512),
        (GraphKind.SHARED, 512),
    ]


def test_no_graphs_at_zero_limits():
    assert GraphCatalog(max_sequences=0, max_tokens=512, group=1).largest_first == []
    only_decode = GraphCatalog(max_sequences=8, max_tokens=0, group=1).largest_first
    assert {shape.kind for shape in only_decode} == {GraphKind.DECODE}
