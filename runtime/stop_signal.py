"""The signal that ends a worker or a detokenizer, as a process or as a thread of the Engine."""

from __future__ import annotations

import threading
from collections.abc import Callable


class StopSignal(threading.Event):
    """An event that also runs functions when it is set, such as `Waker.wake`, so that a poll ends at once."""

    def __init__(self) -> None:
        super().__init__()
        self._actions: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def on_set(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the thread that sets the signal; now, if it is set already."""
        with self._lock:
            self._actions.append(action)
            is_late = self.is_set()
        if is_late:
            action()

    def set(self) -> None:
        with self._lock:
            super().set()
            actions = list(self._actions)
        for action in actions:
            action()
