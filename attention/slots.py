"""Reading slots of a KV pool: as a view if they form one run, else gathered."""

from __future__ import annotations

import numpy as np
import torch


def run_or_index(slots: torch.Tensor, *, any_order: bool = False) -> slice | torch.Tensor:
    """int32 [keys] -> a slice of the pool if the slots are one ascending run (no copy needed), else the slots.

    any_order: the run may be shuffled, which makes no difference to a query that sees all keys. Checked on the CPU
    only: on a GPU it would wait for the device.
    """
    if slots.device.type != "cpu":
        return slots
    host = slots.numpy()
    count = len(host)
    if any_order:  # no slot occurs twice, so the extremes are enough
        first = int(host.min())
        is_run = int(host.max()) - first == count - 1
    else:
        first = int(host[0])
        is_run = int(host[-1]) - first == count - 1 and bool((np.diff(host) == 1).all())
    return slice(first, first + count) if is_run else slots


def gather(pool: torch.Tensor, slots: slice | torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """pool [slots, kv_heads, head_dim] -> [keys, kv_heads, head_dim], a view of the pool or of the start of buffer."""
    if isinstance(slots, slice):
        return pool[slots]
    return torch.index_select(pool, 0, slots, out=buffer[: len(slots)])
