"""Blocks with pages scattered in the memory of a pool.

A store needs a block in one piece. Pages that are neighbours in the right order are one already, and so is a block of
one page: these are used where they lie. Others go through a scratch block, in one call without the GIL each way.
"""

from __future__ import annotations

import numpy as np


class BlockPages:
    """Reads and writes blocks in ``pages``, for one thread at a time; `numbers` may be called by any.

    pages: uint8 [num_pages, page_nbytes], the pool's memory itself (`HostPool.pages_view`); page 0 is padding.
    """

    def __init__(self, pages: np.ndarray, block_bytes: int) -> None:
        if pages.dtype != np.uint8 or pages.ndim != 2 or not pages.flags.c_contiguous or not pages.flags.writeable:
            raise ValueError(
                f"pages must be contiguous, writable uint8 [pages, bytes of a page], not {pages.dtype} "
                f"{list(pages.shape)} (contiguous: {pages.flags.c_contiguous}, writable: {pages.flags.writeable})"
            )
        if not pages.shape[1] or block_bytes % pages.shape[1]:
            raise ValueError(f"a block of {block_bytes} bytes is no whole number of pages of {pages.shape[1]}")
        self.block_bytes = block_bytes
        self.pages_per_block = block_bytes // pages.shape[1]
        self._pages = pages
        self._scratch: np.ndarray | None = None

    def numbers(self, pages: np.ndarray, blocks: int) -> np.ndarray:
        """int64 [blocks, pages per block]: a copy of page numbers, which must be of pages that hold tokens."""
        numbers = np.asarray(pages)
        if numbers.dtype.kind not in "iu" or numbers.size != blocks * self.pages_per_block:
            raise ValueError(
                f"{blocks} blocks need {self.pages_per_block} page numbers each, not {numbers.dtype} "
                f"{list(numbers.shape)}"
            )
        if numbers.size and not 0 < numbers.min() <= numbers.max() < len(self._pages):
            wrong = numbers[(numbers < 1) | (numbers >= len(self._pages))][0]
            raise ValueError(f"page {wrong} is not one of 1 … {len(self._pages) - 1}")
        return numbers.reshape(blocks, self.pages_per_block).astype(np.int64)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        """uint8 [block_bytes]: the block in these pages, int64 [pages per block]. It stays until the next call."""
        room = self.room(numbers)
        if room is self._scratch:
            np.take(self._pages, numbers, axis=0, out=room.reshape(len(numbers), -1), mode="clip")  # clip: unbuffered
        return room

    def room(self, numbers: np.ndarray) -> np.ndarray:
        """uint8 [block_bytes], where a block for these pages can be put together: the pages, or the scratch block."""
        first, count = int(numbers[0]), len(numbers)
        if (numbers == np.arange(first, first + count)).all():
            return self._pages[first : first + count].reshape(-1)
        if self._scratch is None:
            self._scratch = np.empty(self.block_bytes, np.uint8)
        return self._scratch

    def scatter(self, numbers: np.ndarray) -> None:
        """Put the block that is in ``room(numbers)`` into its pages, if it is not there already."""
        room = self.room(numbers)
        if room is self._scratch:
            self._pages[numbers] = room.reshape(len(numbers), -1)
