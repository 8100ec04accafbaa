"""Interface of the background copies between the device's KV pool and the host's.

    scheduler's thread      order_copies ──▶ copies, made one after the other ──▶ poll
    the model               wait_layer, before it reads a layer

A thread does it for a CPU (thread_transfer.py), streams for a GPU (stream_transfer.py); `make_transfers` has the right
one. What is copied when is decided elsewhere (`radix/tiers/host_tier.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ...radix.tiers.host_tier import TierCopy


class Ended(NamedTuple):
    """A copy that has ended: its slots are neither read nor written any more."""

    fence: int
    """The fence of its TierCopy."""
    ok: bool
    seconds: float
    """Duration without its time in the queue."""


class TransferError(RuntimeError):
    """KV that a step reads did not come from the host."""


class Transfers(Protocol):
    """Called from the scheduler's thread, which launches the steps. Only `wait_layer` raises."""

    def order_copies(self, copies: Sequence[TierCopy]) -> None:
        """Queue these copies; their order among each other is free. Does not wait.

        The loads of one call go layer by layer, all together. Steps that are launched from now on wait for them.
        """
        ...

    def wait_layer(self, layer: int) -> None:
        """The model is about to use a layer's K and V: return once all loads ordered so far have brought this layer,
        and those before it. (On a GPU the current stream waits, not the caller.)

        Raises TransferError if one of them failed and `poll` has not reported it yet: the steps launched meanwhile must
        fail.
        """
        ...

    def wait_states(self) -> None:
        """The model is about to read recurrent states: likewise, for the states of all loads ordered so far."""
        ...

    @property
    def loading(self) -> bool:
        """True if a step launched now must wait for layers; else `wait_layer` need not be called. A CUDA graph cannot
        wait, so none may be replayed while this is true."""
        ...

    @property
    def under_way(self) -> int:
        """Copies that were ordered and have not been polled."""
        ...

    def poll(self) -> list[Ended]:
        """Copies that ended since the last call, each once, successful or not. Does not wait."""
        ...

    def close(self, timeout: float) -> bool:
        """Cancel the copies that have not begun, and wait up to ``timeout`` seconds for those in progress. False if
        they have not ended by then: their slots are in use, and the pools must stay. May be called again."""
        ...


def describe(copy: TierCopy) -> str:
    """For logs and errors."""
    state = " and a recurrent state" if copy.device_state else ""
    way = "from the device to the host" if copy.to_host else "from the host to the device"
    return f"copy of the KV of {len(copy.host_slots)} tokens{state} {way}"


def check_loads(failed: dict[int, str]) -> None:
    """failed: why loads failed, by fence. Raises TransferError if any did."""
    if failed:
        reason = next(iter(failed.values()))
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise TransferError(f"{reason}{others}; send the request again, its prefix will be computed")
