"""Works out which pages each sequence of a step reads, as the arrays that paged attention kernels take. Plain
arithmetic on the host, from lengths that the host knows, so planning does not wait for the device.

    sequence i:  queries[i] new tokens read positions starts[i] … stops[i] - 1 of row rows[i] of req_to_token

A sliding window moves `starts` to the page that holds the first visible position. Kernels place queries at the end of
what they read, so causality and window stay right. With a shared prefix a step is cut in two (cascade attention:
Juravsky et al. 2024; Ye et al. 2024): in `prefixes`, one sequence per group attends all the group's queries to the
positions they share; in `tails`, each row attends to the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .backend import AttentionBatch, SharedPrefix


@dataclass(slots=True, frozen=True)
class PagedSequences:
    """int64 [n] each; starts are multiples of page_size."""

    page_size: int
    queries: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_pages(self) -> np.ndarray:
        """int64 [n]"""
        return -((self.starts - self.stops) // self.page_size)

    @property
    def qo_indptr(self) -> np.ndarray:
        """int32 [n + 1]: where each sequence's queries begin, and the end of all."""
        return _indptr(self.queries)

    @property
    def kv_indptr(self) -> np.ndarray:
        """int32 [n + 1]: where each sequence's pages begin, and the end of all."""
        return _indptr(self.num_pages)

    @property
    def last_page_lens(self) -> np.ndarray:
        """int32 [n]: positions read in each sequence's last page."""
        return (self.stops - self.starts - (self.num_pages - 1) * self.page_size).astype(np.int32)

    def padded(self, count: int, pad_row: int) -> PagedSequences:
        """Padded to ``count`` sequences; the added ones have no query and read one position of the padding row."""
        missing = count - len(self)
        if missing == 0:
            return self
        return PagedSequences(
            self.page_size,
            np.append(self.queries, np.zeros(missing, dtype=np.int64)),
            np.append(self.rows, np.full(missing, pad_row)),
            np.append(self.starts, np.zeros(missing, dtype=np.int64)),
            np.append(self.stops, np.ones(missing, dtype=np.int64)),
        )


def whole(batch: AttentionBatch, window: int | None, page_size: int) -> PagedSequences:
    """Every sequence reads all that it can see."""
    prefix = batch.prefix_lens.astype(np.int64)
    extend = batch.extend_lens.astype(np.int64)
    starts = np.zeros_like(prefix)
    if window is not None:
        starts = np.maximum(prefix - window + 1, 0) // page_size * page_size
    return PagedSequences(page_size, extend, batch.host_rows.astype(np.int64), starts, prefix + extend)


def useful_groups(batch: AttentionBatch, window: int | None, page_size: int) -> list[SharedPrefix]:
    """Groups in which all queries see the whole prefix, cut to whole pages; groups left without a page drop out."""
    groups = []
    for group in batch.shared:
        length = group.length // page_size * page_size
        if length and (window is None or int(batch.prefix_lens[group.first]) + 1 <= window):
            groups.append(SharedPrefix(group.first, group.count, length))
    return groups


def saved_keys(groups: list[SharedPrefix]) -> int:
    """Keys that need not be read again for each row."""
    return sum((group.count - 1) * group.length for group in groups)


def prefixes(batch: AttentionBatch, groups: list[SharedPrefix], page_size: int) -> tuple[PagedSequences, np.ndarray]:
    """The shared part of a step with one query per row, and bool [rows]: which rows are in a group.

    The kernel needs its queries without gaps. So rows between groups form sequences over one position of the padding
    row; their results are not merged.
    """
    parts: list[tuple[int, int, int]] = []  # queries, row, length
    grouped = np.zeros(len(batch.host_rows), dtype=bool)
    end = 0
    for group in sorted(groups, key=lambda group: group.first):
        if group.first > end:
            parts.append((group.first - end, batch.pad_row, 1))
        parts.append((group.count, int(batch.host_rows[group.first]), group.length))
        end = group.first + group.count
        grouped[group.first : end] = True
    if end < len(grouped):
        parts.append((len(grouped) - end, batch.pad_row, 1))
    queries, rows, stops = np.array(parts, dtype=np.int64).T
    return PagedSequences(page_size, queries, rows, np.zeros_like(rows), stops), grouped


def tails(batch: AttentionBatch, groups: list[SharedPrefix], window: int | None, page_size: int) -> PagedSequences:
    """Each row reads what lies after its group's prefix; a row in no group reads all that it sees."""
    sequences = whole(batch, window, page_size)
    for group in groups:
        sequences.starts[group.first : group.first + group.count] = group.length
    return sequences


def _indptr(counts: np.ndarray) -> np.ndarray:
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    return indptr
