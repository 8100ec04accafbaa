"""Copies between the KV pool of a GPU and pinned host memory by `Ops.transfer_kv`: one launch for any number of tokens.

The kernel copies tokens that lie at layer[i] + number × token bytes, and takes the same numbers for all layers. In host
memory the layers of a page follow each other, but seen from where a layer begins, that too is an array of tokens:

    device    token o of page p is number  p × page_size + o
    host      token o of page p is number  p × page_size × 2 × layers + o

So pages need no kernel of their own, and a warp of it copies a token, however large the pages are.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from ...memory_pool.kv_pool import KVLayers, KVPool, MHAKVPool, uniform_shapes
from ...memory_pool.stores.host_copies import CopyPages, PagedLayers, upload
from ...memory_pool.stores.host_pool import HostPool
from ..layers.ops import TORCH_OPS, CopyKVOp

logger = logging.getLogger(__name__)

TRIAL_PAGES = 3


def choose_copies(transfer: CopyKVOp, device_pool: KVPool) -> CopyPages | None:
    """Copies by ``transfer``, the device's operation, after a trial with the sizes of the pool; None for `HostPool`'s
    own copies: if the operation is torch's, which waits for the device, if layers differ in size, or if the trial
    fails."""
    if transfer is TORCH_OPS.transfer_kv or not device_pool.layers.is_uniform:
        return None
    copies = KernelCopies(transfer, device_pool.page_size, device_pool.device)
    try:
        wrong = None if copies_exactly(copies, device_pool) else "it copied other bytes"
    except Exception as error:  # a kernel may raise anything
        wrong = f"{type(error).__name__}: {error}"
    if wrong is None:
        return copies
    logger.warning("torch copies between device and host memory, the kernel failed its trial: %s", wrong)
    return None


class KernelCopies:
    """See `CopyPages` and the module's docstring. Queues on the current stream, and does not wait."""

    def __init__(self, transfer: CopyKVOp, page_size: int, device: torch.device) -> None:
        self._transfer = transfer
        self._page_size = page_size
        self._device = device
        self._seen: dict[int, tuple[PagedLayers, KVLayers]] = {}
        """By the identity of its key, which it keeps alive: a pool has one for each slice of layers."""

    def __call__(
        self, source: PagedLayers, target: PagedLayers, source_pages: np.ndarray, target_pages: np.ndarray
    ) -> None:
        numbers = np.stack([self._numbers(source, source_pages), self._numbers(target, target_pages)])
        from_tokens, to_tokens = upload(numbers, self._device)
        self._transfer(self._layers(source), self._layers(target), from_tokens, to_tokens)

    def _numbers(self, layers: PagedLayers, pages: np.ndarray) -> np.ndarray:
        """int64 [pages × page_size]: the numbers of the tokens of these pages."""
        per_page = int(layers.steps[0]) // self._token_bytes(layers)  # the same for all planes
        return (pages[:, None] * per_page + np.arange(self._page_size)).ravel()

    def _token_bytes(self, layers: PagedLayers) -> int:
        return layers.page_bytes // self._page_size

    def _layers(self, paged: PagedLayers) -> KVLayers:
        """Each layer as uint8 [tokens, token bytes], up to the end of the memory it is in."""
        if id(paged) not in self._seen:
            size = self._token_bytes(paged)
            tokens = [_as_tokens(plane, size) for plane in paged.planes]
            self._seen[id(paged)] = paged, KVLayers.of(tokens[0::2], tokens[1::2], self._device)
        return self._seen[id(paged)][1]


def _as_tokens(plane: torch.Tensor, size: int) -> torch.Tensor:
    """uint8 [tokens, size]: from the plane's beginning to the end of the memory it is in."""
    count = (plane.untyped_storage().nbytes() - plane.storage_offset()) // size
    return plane.as_strided((count, size), (size, 1))


def copies_exactly(copies: CopyPages, device_pool: KVPool) -> bool:
    """True if pages of random bytes reach host memory and come back, a layer at a time. Uses pools of its own."""
    page_size, device = device_pool.page_size, device_pool.device
    heads, head_dim = device_pool.k[0].shape[1:]
    small = MHAKVPool(
        num_tokens=TRIAL_PAGES * page_size,
        page_size=page_size,
        shapes=uniform_shapes(len(device_pool.k), heads, head_dim),
        dtype=device_pool.dtype,
        device=device,
    )
    generator = torch.Generator().manual_seed(0)
    before, tensors = [], [tensor for layer in zip(small.k, small.v) for tensor in layer]  # in the host's order
    for layer in tensors:
        noise = torch.randint(0, 256, (layer.nbytes,), generator=generator, dtype=torch.uint8)
        layer.view(torch.uint8).view(-1).copy_(noise)
        before.append(noise.view(TRIAL_PAGES + 1, -1))
    host = HostPool(small, TRIAL_PAGES * page_size, copy_pages=copies)
    slots = np.arange(small.num_slots).reshape(-1, page_size)
    stored, kept, loaded = slots[[3, 1]].ravel(), slots[[1, 2]].ravel(), slots[[2, 3]].ravel()
    host.store(stored, kept)
    for layer in range(host.num_layers):
        host.load(kept, loaded, slice(layer, layer + 1))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # reading host memory does not wait for the device
    arrived = host.memory.view(torch.uint8).view(host.num_pages, 2 * host.num_layers, -1)
    for plane, (layer, noise) in enumerate(zip(tensors, before, strict=True)):
        if not torch.equal(arrived[[1, 2], plane], noise[[3, 1]]) or arrived[[0, 3], plane].any():
            return False
        expected = noise[[0, 1, 3, 1]]
        if not torch.equal(layer.view(torch.uint8).view(TRIAL_PAGES + 1, -1).cpu(), expected):
            return False
    return True
