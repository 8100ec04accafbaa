"""A finished request on the server, and how many states may still go on from it.

    gen ends ──▶ Stage(rid), held by its state ──fork(2)──▶ held by three

A holder leaves when it goes on to its own next stage, or ends. While there are other holders, its step asks the server
to keep the lease; the last holder takes the lease over or releases it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Stage:
    """``index``: which of the request's samples goes on. num_tokens: how many tokens a child inherits; None if a stop
    string hides it. release: gives up the leases of a rid; None if there are none."""

    def __init__(
        self,
        rid: str,
        release: Callable[[str], None] | None,
        *,
        index: int = 0,
        num_samples: int = 1,
        num_tokens: int | None = None,
    ) -> None:
        self.rid = rid
        self.index = index
        self.num_tokens = num_tokens
        self._release = release
        self._num_samples = num_samples
        self._holders = 1
        self._handed_off = False
        self._lock = threading.Lock()

    def join(self) -> Stage:
        """One more state may go on from here."""
        with self._lock:
            self._holders += 1
        return self

    @property
    def is_shared(self) -> bool:
        with self._lock:
            return self._holders > 1

    def leave(self, *, handed_off: bool = False) -> None:
        """A holder has gone on or ended. ``handed_off``: its step took the lease over."""
        with self._lock:
            self._holders -= 1
            # With several samples, the step took only one sample's lease.
            self._handed_off |= handed_off and self._num_samples == 1
            over = self._holders == 0 and not self._handed_off
        if over and self._release is not None:
            self._release(self.rid)
