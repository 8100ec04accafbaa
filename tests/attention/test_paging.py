"""Plan arithmetic against a loop over the sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.attention import paging
from baton.attention.backend import AttentionBatch, SharedPrefix


def make_batch(lengths: list[tuple[int, int]], shared: tuple[SharedPrefix, ...] = ()) -> AttentionBatch:
    count = len(lengths)
    return AttentionBatch(
        req_to_token=torch.zeros(count + 1, 8, dtype=torch.int32),
        host_rows=np.arange(count, dtype=np.int32)[::-1].copy(),
        prefix_lens=np.array([prefix for prefix, _ in lengths], dtype=np.int32),
        extend_lens=np.array([new for _, new in lengths], dtype=np.int32),
        pad_row=count,
        shared=list(shared),
    )


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 7, 64, 1000])
def test_whole_sequences_are_paged(page_size, window):
    rng = np.random.default_rng(page_size)
    lengths = [(int(rng.integers(0, 200)), int(rng.integers(1, 30))) for _ in range(50)]
    found = paging.whole(make_batch(lengths), window, page_size)
    pages_before = 0
    for i, (prefix, new) in enumerate(lengths):
        first = 0 if window is None else max(0, prefix - window + 1)  # what the first query sees
        start, stop = int(found.starts[i]), int(found.stops[i])
        assert stop == prefix + new and start % page_size == 0 and first - page_size < start <= first
        assert found.kv_indptr[i] == pages_before
        pages_before += -(-(stop - start) // page_size)
        read = (found.num_pages[i] - 1) * page_size + found.last_page_lens[i]
        assert read == stop - start and 1 <= found.last_page_lens[i] <= page_size
    assert found.kv_indptr[-1] == pages_before
    assert found.qo_indptr.tolist() == [0, *np.cumsum([new for _, new in lengths])]
    assert found.qo_indptr.dtype == found.kv_indptr.dtype == found.last_page_lens.dtype == np.int32


def test_padding_reads_one_position_of_the_padding_row():
    padded = paging.whole(make_batch([(5, 2), (0, 1)]), None, 4).padded(5, pad_row=9)
    assert len(padded) == 5 and padded.rows.tolist() == [1, 0, 9, 9, 9]
    assert padded.qo_indptr.tolist() == [0, 2, 3, 3, 3, 3]
    assert padded.num_pages.tolist() == [2, 1, 1, 1, 1] and padded.last_page_lens.tolist() == [3, 1, 1, 1, 1]
    assert padded.padded(5, pad_row=9) is padded


def test_prefixes_and_tails_cover_whole_sequences():
    groups = [SharedPrefix(4, 2, 32), SharedPrefix(1, 2, 16)]
    batch = make_batch([(9, 1), (20, 1), (20, 1), (3, 1), (40, 1), (40, 1), (1, 1)], tuple(groups))
    prefix, grouped = paging.prefixes(batch, groups, 16)
    tail = paging.tails(batch, groups, None, 16)
    assert prefix.queries.tolist() == [1, 2, 1, 2, 1] and grouped.tolist() == [
        False,
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    assert prefix.rows.tolist() == [7, 5, 7, 2, 7] and prefix.stops.tolist() == [1, 16, 1, 32, 1]
    assert tail.starts.tolist() == [0, 16, 16, 0, 32, 32, 0] and tail.stops.tolist() == [10, 21, 21, 4, 41, 41, 2]
    assert paging.saved_keys(groups) == 48


def test_ungrouped_rows_are_padding_in_prefix_part():
    prefix, grouped = paging.prefixes(make_batch([(9, 1), (20, 1)]), [], 1)
    assert prefix.queries.tolist() == [2] and not grouped.any()


def test_useful_groups_are_whole_pages_within_window():
    batch = make_batch([(40, 1)] * 4, (SharedPrefix(0, 2, 40), SharedPrefix(2, 2, 15)))
    assert paging.useful_groups(batch, None, 16) == [SharedPrefix(0, 2, 32)], "whole pages"
    assert paging.useful_groups(batch, 41, 1) == batch.shared and paging.useful_groups(batch, 40, 1) == []
