"""torch.cuda's streams and events without a GPU: work is queued, and run later in any order that the streams allow.

What is queued runs only in `FakeCuda.run`, one piece after the other, each from a stream chosen at random among those
that may go on. So a wait that is missing shows up as an order in which it was needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from baton.memory_pool.stores.host_copies import CopyPages, PagedLayers, copy_pages_numpy


@dataclass
class Piece:
    """Work of a stream. It may run once ``ready`` says so."""

    run: Callable[[], None]
    ready: Callable[[], bool]


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._recorded = False
        self.time: float | None = None

    def record(self) -> None:
        assert not self._recorded, "events here are recorded once"
        self._recorded = True
        self._cuda.queue(self._happen)

    def query(self) -> bool:
        assert self._recorded, "this event was never recorded"
        return self.time is not None

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds."""
        assert self.time is not None and end.time is not None, "torch raises while events are to come"
        return end.time - self.time

    def _happen(self) -> None:
        self.time = self._cuda.now


@dataclass(eq=False)
class FakeStream:
    cuda: FakeCuda
    pieces: deque[Piece] = field(default_factory=deque)
    held: bool = False
    """Nothing runs."""

    def wait_event(self, event: FakeEvent) -> None:
        self.pieces.append(Piece(lambda: None, event.query))

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent(self.cuda)
        with self.cuda.stream(other):
            event.record()
        self.wait_event(event)

    def synchronize(self) -> None:
        while self.pieces:
            self.cuda.run(1)


class FakeCuda:
    """Stands for the module torch.cuda. A piece of work takes a millisecond."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.streams: list[FakeStream] = []
        self.now = 0.0
        self.compute = self._current = self.Stream()

    def Stream(self, device: object = None) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def Event(self, *, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def queue(self, run: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        """On the current stream."""
        self._current.pieces.append(Piece(run, ready))

    def run(self, count: int | None = None) -> None:
        """So many pieces; None: all that can run."""
        while count is None or count > 0:
            able = [s for s in self.streams if s.pieces and not s.held and s.pieces[0].ready()]
            if not able:
                assert count is None, "nothing can run: who waits is waiting for ever"
                return
            self.now += 1.0
            able[self._rng.integers(len(able))].pieces.popleft().run()
            count = None if count is None else count - 1

    def queued(self, copy: CopyPages = copy_pages_numpy) -> CopyPages:
        """A copy that is queued on the current stream."""

        def copy_pages(
            source: PagedLayers, target: PagedLayers, source_pages: np.ndarray, target_pages: np.ndarray
        ) -> None:
            pages = source_pages.copy(), target_pages.copy()
            self.queue(lambda: copy(source, target, *pages))

        return copy_pages
