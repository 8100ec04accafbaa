"""KV that left the device, in host memory, page by page.

    memory: uint8 [pages, planes, plane bytes]        the planes of layer 0, of layer 1, …; see host_copies.py

A page of all layers is one contiguous piece, so that it goes to a disk or over a wire in one copy. The device's pool
has it in 2 × layers places, and `store` and `load` bridge that; how is in host_copies.py. As on the device page 0 is
padding, so that an `Allocator` numbers the slots of both. It does not know which tokens are where.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

from ..kv_pool import KVLayers, KVPool, untouched_zeros
from ..kv_rows import SCALE_BYTES, is_quantized
from .host_copies import CopyPages, PagedLayers, copies_for, device_planes, host_planes, plane_bytes


class HostPool:
    """Host memory for num_tokens tokens of a device pool. Raises MemoryError where the host cannot hold it. Of a pool
    without layers it takes none.

    pin: lock the memory, so that a GPU reads and writes it by itself; by default if the device is a GPU. Memory that is
    not pinned is taken only as it is used.
    copy_pages: copies between the two; a GPU may have a kernel for it.

    `store` and `load` hold no state between calls: any threads may run them at the same time, as long as no page of one
    call is written by another. On a GPU they queue on the current stream, and it is the caller's to know when that is
    done. Their temporary memory does not grow with the number of slots.
    """

    def __init__(
        self,
        device_pool: KVPool,
        num_tokens: int,
        *,
        pin: bool | None = None,
        copy_pages: CopyPages | None = None,
    ) -> None:
        """num_tokens: usable tokens, a positive multiple of the page size; the padding page comes on top."""
        page_size = device_pool.page_size
        if num_tokens < page_size or num_tokens % page_size:
            raise ValueError(
                f"host KV pool of {num_tokens} tokens: use a positive multiple of the page size ({page_size})"
            )
        self.num_tokens = num_tokens
        self.page_size = page_size
        self.num_slots = num_tokens + page_size
        self.num_pages = self.num_slots // page_size
        self.num_layers = len(device_pool.layers.k)
        self.dtype, self.model_dtype = device_pool.dtype, device_pool.model_dtype
        self.scales = _scales_of_page(device_pool.layers, page_size) if is_quantized(self.dtype) else None
        """int64 [n]: which float32 of a page are the scales of its rows; None where rows have none."""
        self.bytes_per_token = device_pool.bytes_per_token
        self.pinned = device_pool.device.type == "cuda" if pin is None else pin
        self.copied_by, self._copy_pages = copies_for(device_pool.device)
        if copy_pages is not None:
            self.copied_by, self._copy_pages = "a kernel of the device", copy_pages
        if self.pinned and not torch.cuda.is_available():
            raise ValueError("pinned host memory needs a CUDA device; leave pin out, or set it to False")
        size = plane_bytes(device_pool.layers, page_size)
        of_layers = device_planes(device_pool.layers, page_size, size)
        self._first_planes = np.cumsum([0, *map(len, of_layers)]).tolist()
        """Where the planes of each layer begin, and where those of the last end."""
        try:
            shape = (self.num_pages, self._first_planes[-1], size)
            self.memory = untouched_zeros(shape, torch.uint8, torch.device("cpu"))
            if self.pinned and self.memory.nbytes:
                pin_memory(self, self.memory)
        except (MemoryError, ValueError) as error:  # ValueError: more than there are addresses
            raise MemoryError(f"cannot allocate the {self.describe()}; ask for fewer tokens") from error
        self._device_pages = device_pool.num_slots // page_size
        self._device_planes = [plane for planes in of_layers for plane in planes]
        self._device = PagedLayers.of(self._device_planes)
        self._host = host_planes(self.memory)
        self._parts: dict[tuple[int, int], tuple[PagedLayers, PagedLayers]] = {}

    @property
    def layout(self) -> str:
        """What the bytes of a page mean, for fingerprints: bytes per token of each layer, in the order of planes."""
        sizes = [count * self.memory.shape[2] // self.page_size for count in np.diff(self._first_planes).tolist()]
        return f"{len(sizes)} of {sizes[0]} bytes" if len(set(sizes)) == 1 else f"of {sizes} bytes"

    def describe(self) -> str:
        """One line for the start-up log: tokens x bytes per token = size."""
        size = self.num_tokens * self.bytes_per_token / 2**30
        kind = "pinned, " if self.pinned else ""
        return (
            f"host KV pool: {self.num_tokens} tokens × {self.bytes_per_token} bytes = {size:.2f} GiB "
            f"({kind}copied by {self.copied_by})"
        )

    # -- device and host ---------------------------------------------------------------------------------------------

    def store(self, device_slots: np.ndarray, host_slots: np.ndarray) -> None:
        """Copy tokens of all layers to the host. int32 or int64 [n]: whole pages in any order, the tokens of a page in
        theirs, no host page twice."""
        device_pages, host_pages = self._pages(device_slots, host_slots)
        if len(host_pages) and self._device.planes:
            self._copy_pages(self._device, self._host, device_pages, host_pages)

    def load(self, host_slots: np.ndarray, device_slots: np.ndarray, layers: slice | None = None) -> None:
        """Copy tokens to the device, of all layers or of a slice of them. Slots as in `store`; no device page twice."""
        device_pages, host_pages = self._pages(device_slots, host_slots)
        host, device = (self._host, self._device) if layers is None else self._some(layers)
        if len(host_pages) and device.planes:
            self._copy_pages(host, device, host_pages, device_pages)

    def _some(self, layers: slice) -> tuple[PagedLayers, PagedLayers]:
        first, stop, step = layers.indices(self.num_layers)
        if step != 1:
            raise ValueError(f"layers are loaded in one run, not in steps of {step}: {layers}")
        if stop <= first:
            nothing = PagedLayers.of([])
            return nothing, nothing
        if (first, stop) not in self._parts:
            planes = slice(self._first_planes[first], self._first_planes[stop])
            device = PagedLayers.of(self._device_planes[planes])
            self._parts[first, stop] = host_planes(self.memory[:, planes]), device
        return self._parts[first, stop]

    def _pages(self, device_slots: np.ndarray, host_slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if len(device_slots) != len(host_slots):
            raise ValueError(f"{len(device_slots)} device slots for {len(host_slots)} host slots; they go in pairs")
        return (
            _whole_pages("device", device_slots, self.page_size, self._device_pages),
            _whole_pages("host", host_slots, self.page_size, self.num_pages),
        )

    # -- as bytes ----------------------------------------------------------------------------------------------------

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page, all layers, K and V."""
        return self.page_size * self.bytes_per_token

    @property
    def pages_view(self) -> np.ndarray:
        """uint8 [pages, page_nbytes]: the pool's memory itself, to be read and written; page 0 is padding."""
        return self.memory.view(self.num_pages, -1).numpy()

    def page_bytes(self, page: int) -> np.ndarray:
        """uint8 [page_nbytes]: the memory of one page, not a copy."""
        if not 0 < page < self.num_pages:
            raise IndexError(f"host page {page}: there are pages 1 … {self.num_pages - 1}")
        return self.pages_view[page]


def _scales_of_page(layers: KVLayers, page_size: int) -> np.ndarray:
    """See HostPool.scales: a row ends with its scale."""
    ends, begin = [], 0
    for number in range(len(layers.k)):
        for tensor in (layers.k[number], layers.v[number]):
            rows, size = page_size * tensor.shape[1], tensor.shape[2]
            ends.append(begin + size * np.arange(1, rows + 1))
            begin += size * rows
    return np.concatenate(ends) // SCALE_BYTES - 1


def pin_memory(owner: object, memory: torch.Tensor) -> None:
    """Lock this memory for as long as its owner lives. torch's own pinned tensors would round it up to a power of two.
    Raises MemoryError if the driver cannot."""
    runtime, start = torch.cuda.cudart(), memory.data_ptr()
    assert runtime is not None, "there is a CUDA device"
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(start, memory.nbytes, 0))
    except RuntimeError as error:
        raise MemoryError("the driver cannot lock that much memory") from error
    weakref.finalize(owner, runtime.cudaHostUnregister, start).atexit = False


def _whole_pages(where: str, slots: np.ndarray, page_size: int, num_pages: int) -> np.ndarray:
    """int64 [n / page_size]: the pages of slots, which must be whole, inside the pool and not the padding page."""
    if slots.ndim != 1 or slots.dtype not in (np.int32, np.int64):
        raise ValueError(f"{where} slots must be int32 or int64 [n], not {slots.dtype} {list(slots.shape)}")
    if len(slots) % page_size:
        raise ValueError(f"{len(slots)} {where} slots are no whole pages of {page_size} tokens")
    pages = slots[::page_size].astype(np.int64) // page_size
    if page_size > 1:
        wrong = slots.reshape(-1, page_size) != (pages * page_size)[:, None] + np.arange(page_size)
        if wrong.any():
            row = int(wrong.any(axis=1).argmax())
            raise ValueError(
                f"{where} slots {row * page_size} … {(row + 1) * page_size - 1} of {len(slots)} are not one whole page "
                f"of {page_size} tokens in order"
            )
    if len(pages) and not 0 < pages.min() <= pages.max() < num_pages:
        wrong = int(pages[(pages < 1) | (pages >= num_pages)][0])
        raise ValueError(f"{where} page {wrong} (of {page_size} tokens) is not one of 1 … {num_pages - 1}")
    return pages


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
