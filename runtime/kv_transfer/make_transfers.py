"""Chooses who makes the copies between a device's KV pool and the host's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...memory_pool.stores.host_pool import HostPool
from .stream_transfer import StreamTransfers
from .thread_transfer import ThreadTransfers
from .transfer import Transfers


def make_transfers(pool: HostPool, device: torch.device, wake: Callable[[], None]) -> Transfers:
    """wake: ends the event loop's sleep, see `ThreadTransfers`; with a GPU nobody calls it. To be closed."""
    if device.type != "cuda":
        return ThreadTransfers(pool, wake)
    return StreamTransfers(pool, device, layers_at_once=pool.num_layers if pool.copied_by == "torch" else 1)
