"""Copies of whole pages between the device's KV pool and host memory.

    device   k[layer], v[layer]: [pages, page bytes]         a page is in 2 × layers places
    host     block: [pages, planes, plane bytes]             a page is one piece: K of layer 0, V of layer 0, K of …

A *plane* is K or V of one layer; layers of latents have K only, and half as many places. Where planes would differ in
size, each is cut into planes of the largest size that divides all of them, so that every copy is of pieces of one size.

Both sides are described by the same `PagedLayers`, so that one function copies either way. Pages stand in any order and
need not be neighbours: every page of every layer is a piece of its own, of 512 bytes where pages are single tokens.
Pieces that small dominate the cost: each is a miss in the caches. That leaves three functions:

- Numba's, for a CPU (numba_copies.py): one call without the GIL, and stores that pass the caches by.
- `copy_pages_numpy`, for a CPU without Numba: slices where neighbours stay neighbours, else it gathers and scatters,
  which goes through memory twice.
- `copy_pages_torch`, for a GPU: gathers on the device, and takes each run of host pages in one transfer. Where there is
  a kernel for it, that is given to `HostPool` instead (runtime/kv_transfer/kernel_copies.py).

None of them starts threads: a copy runs beside the model, and the model needs the cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ..kv_pool import KVLayers
from .numba_copies import compile_copy

LONG_RUN = 2**14
"""Bytes of one layer from which on numpy copies slices: a call takes about as long as 4 KiB."""

GATHERED = 2**19
"""Bytes of one layer that numpy gathers before it scatters them: they stay in the core's own cache."""

GATHERED_PIECES = 512
"""Least pieces to gather at a time: numpy keeps the GIL for up to 500."""

STAGED = 2**24
"""Bytes of a GPU that hold pages on their way."""


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """K and V of some layers, in the form that page copies use."""

    planes: list[torch.Tensor]
    """Layer after layer, K before V: uint8 [pages, plane bytes]. Rows are contiguous."""
    addresses: np.ndarray
    """int64 [planes]: where each begins, for kernels that copy all of them at once."""
    steps: np.ndarray
    """int64 [planes]: bytes from one page to the next."""
    block: torch.Tensor | None = None
    """In host memory the same as one tensor, uint8 [pages, planes, plane bytes]; None on the device."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in one plane."""
        return self.planes[0].shape[1]

    @classmethod
    def of(cls, planes: list[torch.Tensor], block: torch.Tensor | None = None) -> PagedLayers:
        addresses = np.array([plane.data_ptr() for plane in planes], dtype=np.int64)
        return cls(planes, addresses, np.array([plane.stride(0) for plane in planes], dtype=np.int64), block)


CopyPages = Callable[[PagedLayers, PagedLayers, np.ndarray, np.ndarray], None]
"""(source, target, source pages, target pages): copy pages of all planes; int64 [n] each, n > 0, no target page twice.
One of the two is host memory. On a GPU the copy is queued on the current stream and need not be over on return."""


def plane_bytes(layers: KVLayers, page_size: int) -> int:
    """Bytes of a page in one plane: the most that divide a page of K and of V of every layer."""
    return math.gcd(*(page_size * layer.stride(0) * layer.itemsize for layer in (*layers.k, *layers.v)))


def device_planes(layers: KVLayers, page_size: int, size: int) -> list[list[torch.Tensor]]:
    """The planes of each layer. layers: [slots, …], contiguous, slots a multiple of page_size; size: `plane_bytes`."""
    of_layers = []
    for number in range(len(layers.k)):
        tensors = [kind[number] for kind in (layers.k, layers.v) if kind]
        pages = [tensor.view(torch.uint8).view(len(tensor) // page_size, -1) for tensor in tensors]
        of_layers.append([part for whole in pages for part in whole.split(size, dim=1)])
    return of_layers


def host_planes(block: torch.Tensor) -> PagedLayers:
    """block: uint8 [pages, planes, plane bytes], or some planes of such a tensor."""
    return PagedLayers.of(list(block.unbind(1)), block)


def copies_for(device: torch.device) -> tuple[str, CopyPages]:
    """The fastest copy function between this device and host memory, and its name for the log."""
    if device.type != "cpu":
        return "torch", copy_pages_torch
    try:
        return "numba", _numba_copy()
    except ImportError:  # not installed, or not for this numpy
        return "numpy", copy_pages_numpy


def _numba_copy() -> CopyPages:
    """Raises ImportError without Numba. The first call compiles."""
    stream, copy = compile_copy()

    def copy_pages(
        source: PagedLayers, target: PagedLayers, source_pages: np.ndarray, target_pages: np.ndarray
    ) -> None:
        size = source.page_bytes
        in_lines = (size | int(np.bitwise_or.reduce(target.steps | target.addresses))) % 64 == 0
        kernel = stream if in_lines else copy
        kernel(source.addresses, source.steps, source_pages, target.addresses, target.steps, target_pages, size)

    return copy_pages


def copy_pages_numpy(
    source: PagedLayers, target: PagedLayers, source_pages: np.ndarray, target_pages: np.ndarray
) -> None:
    """See `CopyPages`; for a CPU. Many calls: each gives up the GIL while it copies, and takes it again."""
    size, count = source.page_bytes, len(source_pages)
    planes = [(ours.numpy(), theirs.numpy()) for ours, theirs in zip(source.planes, target.planes, strict=True)]
    starts = np.flatnonzero((np.diff(source_pages) != 1) | (np.diff(target_pages) != 1)) + 1
    if count * size >= LONG_RUN * (len(starts) + 1):
        bounds = [0, *starts.tolist(), count]
        for start, stop in pairwise(bounds):
            first, to, length = int(source_pages[start]), int(target_pages[start]), stop - start
            for ours, theirs in planes:
                theirs[to : to + length] = ours[first : first + length]
        return
    page = np.dtype(f"V{size}")  # one item: a gather then moves it in one piece
    pages = [(ours.view(page)[:, 0], theirs.view(page)[:, 0]) for ours, theirs in planes]
    piece = max(GATHERED // size, GATHERED_PIECES)
    for start in range(0, count, piece):
        gathered, scattered = source_pages[start : start + piece], target_pages[start : start + piece]
        for ours, theirs in pages:
            theirs[scattered] = ours[gathered]


def copy_pages_torch(
    source: PagedLayers, target: PagedLayers, source_pages: np.ndarray, target_pages: np.ndarray
) -> None:
    """See `CopyPages`; for any device. Waits for the device only where the host memory is not pinned."""
    up = source.block is not None
    block = source.block if source.block is not None else target.block
    assert block is not None, "one side is host memory"
    device_side, device_pages, host_pages = (
        (target, target_pages, source_pages) if up else (source, source_pages, target_pages)
    )
    block, *planes = _in_words([block, *device_side.planes])
    device = planes[0].device
    piece = max(STAGED // block[0].nbytes, 1)
    for start in range(0, len(host_pages), piece):
        rows = upload(device_pages[start : start + piece], device)
        staged = torch.empty((len(rows), *block.shape[1:]), dtype=block.dtype, device=device)
        by_plane = staged.unbind(1)
        if not up:
            for plane, part in zip(planes, by_plane, strict=True):
                part.copy_(plane.index_select(0, rows))
        for on_host, on_device in _pieces(block, staged, host_pages[start : start + piece]):
            (on_device if up else on_host).copy_(on_host if up else on_device, non_blocking=True)
        if up:
            for plane, part in zip(planes, by_plane, strict=True):
                plane.index_copy_(0, rows, part)


def upload(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """The same numbers on the device, queued on the current stream. From memory that is not pinned the driver might
    wait for all that is queued there; torch keeps pinned memory until the stream has read it."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _in_words(pages: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same bytes, uint8 [..., bytes] each, as int64 where all are whole words: torch's index functions go by
    elements."""
    if any(tensor.shape[-1] % 8 or tensor.storage_offset() % 8 for tensor in pages):
        return pages
    return [tensor.view(torch.int64) for tensor in pages]


def _pieces(
    block: torch.Tensor, staged: torch.Tensor, pages: np.ndarray
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Contiguous pieces of ``pages`` of block, as few as there can be, each with the same piece of staged, which holds
    these pages in this order. One with gaps in it would take a detour through memory that is not pinned."""
    if not block.is_contiguous():  # some layers only
        for row, page in enumerate(pages.tolist()):
            yield block[page], staged[row]
        return
    bounds = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    for start, stop in pairwise(bounds):
        page = int(pages[start])
        yield block[page : page + stop - start], staged[start:stop]
