"""Keeps recent batches of events and sends followers the ones they missed, on a thread of its own: a slow follower
delays only other replays.

A request is the first sequence number wanted, 8 bytes. The answer is one message for each batch, and one to end it:

    batches that are kept:      n, n+1, … last
    older ones:                 [all cleared, everything that is in the cache] as batch s, s+1, … last

So a follower that missed too much, followed an earlier server, or has just connected, ends in the right state by
applying batches in order.

Both REQ and DEALER sockets may ask: an empty frame before the request comes back before each answer. With events as
maps an answer has the frames of a published message: topic, number, payload; with events as arrays it has no topic.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from uuid import uuid4

import zmq

from ...memory_pool.stores.block_store import RareWarnings
from ...radix.block_events import AllCleared, BlockEvent, BlocksRemoved, BlocksStored
from ...radix.node import ID_BYTES
from .wire import END, SEQUENCE_BYTES, Packer, sequence_frame

KnownBlock = tuple[int | None, bytes, str, tuple[str, ...]]
"""Hash of the block before, token ids, scope, tiers. A plain tuple, as there is one for each block in the cache."""


class KnownBlocks:
    """The blocks that all events so far leave in the cache, by hash, each after its parent. A block of 16 tokens takes
    about 250 bytes."""

    def __init__(self, block_tokens: int) -> None:
        self._step = block_tokens * ID_BYTES
        self._blocks: dict[int, KnownBlock] = {}

    def apply_event(self, event: BlockEvent) -> None:
        match event:
            case BlocksStored():
                self._store(event)
            case BlocksRemoved():
                self._remove(event)
            case AllCleared():
                self._blocks.clear()

    def _store(self, event: BlocksStored) -> None:
        blocks, step, ids = self._blocks, self._step, event.ids
        parent, scope, tiers = event.parent, event.scope, (event.tier,)
        for start, name in zip(range(0, len(ids), step), event.hashes, strict=True):
            there = blocks.get(name)
            if there is None:
                blocks[name] = (parent, ids[start : start + step], scope, tiers)
            elif event.tier not in there[3]:
                blocks[name] = (*there[:3], there[3] + tiers)
            parent, scope = name, ""

    def _remove(self, event: BlocksRemoved) -> None:
        blocks, tiers = self._blocks, (event.tier,)
        for name in event.hashes:
            there = blocks.get(name)
            if there is None:
                continue  # two blocks had the same hash
            if there[3] == tiers:
                del blocks[name]
            else:
                blocks[name] = (*there[:3], tuple(tier for tier in there[3] if tier != event.tier))

    def copy(self) -> list[tuple[int, KnownBlock]]:
        """The blocks as a list, for `events_for` in another thread."""
        return list(self._blocks.items())


def events_for(blocks: Sequence[tuple[int, KnownBlock]]) -> list[BlockEvent]:
    """Events that lead to these blocks, and to no others, from any state."""
    tiers = dict.fromkeys(tier for _, block in blocks for tier in block[3])
    events: list[BlockEvent] = [AllCleared()]
    for tier in tiers:
        events += _stored(tier, ((name, block) for name, block in blocks if tier in block[3]))
    return events


def _stored(tier: str, blocks: Iterable[tuple[int, KnownBlock]]) -> list[BlocksStored]:
    """One event for each run of blocks that follow one another."""
    runs: list[tuple[list[int], list[KnownBlock]]] = []
    for name, block in blocks:
        if runs and block[0] == runs[-1][0][-1]:
            runs[-1][0].append(name)
            runs[-1][1].append(block)
        else:
            runs.append(([name], [block]))
    return [
        BlocksStored(tier, names, parent, b"".join(ids for _, ids, *_ in run), scope)
        for names, run in runs
        for parent, _, scope, _ in run[:1]
    ]


Batch = tuple[int, bytes]
"""Sequence number and payload."""


class PastBatches:
    """The recent batches, written by the worker's thread and read by any other. max_bytes: limit for the payloads
    kept."""

    def __init__(self, packer: Packer, block_tokens: int, max_bytes: int, wall_clock: Callable[[], float]) -> None:
        self._packer = packer
        self._max_bytes = max_bytes
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._batches: deque[Batch] = deque()
        self._bytes = 0
        self._last = -1
        self._known = KnownBlocks(block_tokens)
        self._snapshot: Batch | None = None
        """A batch that replaces all up to its number; reused as long as all later ones are kept."""

    def add_batch(self, number: int, payload: bytes, events: Sequence[BlockEvent]) -> None:
        with self._lock:
            for event in events:
                self._known.apply_event(event)
            self._last = number
            self._batches.append((number, payload))
            self._bytes += len(payload)
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._batches.popleft()[1])

    def batches_since(self, first: int) -> list[Batch]:
        """The batches from number ``first`` on; where some are gone, a snapshot takes the place of all before it."""
        with self._lock:
            batches, last = list(self._batches), self._last
            oldest = last + 1 - len(batches)
            if first >= oldest:
                return batches[first - oldest :]
            snapshot = self._snapshot
            if snapshot is not None and snapshot[0] + 1 >= oldest:
                return [snapshot, *batches[snapshot[0] + 1 - oldest :]]
            known = self._known.copy()
        snapshot = self._snapshot = (last, self._packer.payload(events_for(known), self._wall_clock()))
        return [snapshot]


logger = logging.getLogger(__name__)

MAX_UNREAD_ANSWERS = 128
"""Messages that wait for one follower."""

PATIENCE_MS = 1000
"""The longest that a message waits for a follower to read others; then the answer ends, and the follower may ask
again."""

ANSWER_S = 10.0
"""The longest that a whole answer takes, for the same reason."""


def replay_socket() -> zmq.Socket:
    """A socket for `ReplayServer`, not bound yet."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, MAX_UNREAD_ANSWERS)
    router.setsockopt(zmq.RCVHWM, MAX_UNREAD_ANSWERS)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else unread messages would be dropped in the middle of an answer
    router.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
    router.setsockopt(zmq.MAXMSGSIZE, 256)  # a longer frame ends its connection
    return router


class ReplayServer:
    """Answers requests for earlier batches. Owns the socket and the thread."""

    def __init__(self, router: zmq.Socket, past: PastBatches, topic: bytes | None) -> None:
        """topic: the first frame of each answer; None leaves that frame out."""
        self._router = router
        self._past = past
        self._topic = [] if topic is None else [topic]
        self.failed = 0
        """Requests that ended with an error of the server."""
        self._closing = False
        self._warnings = RareWarnings()
        address = f"inproc://baton-kv-replay-{uuid4().hex}"
        self._ended, self._end = (zmq.Context.instance().socket(zmq.PAIR) for _ in range(2))
        self._ended.bind(address)
        self._end.connect(address)
        self._thread = threading.Thread(target=self._run, name="kv-events-replay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the message that is being sent (see `PATIENCE_MS`)."""
        self._closing = True
        self._end.send(b"")
        self._thread.join()
        self._end.close(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._ended, zmq.POLLIN)
        try:
            while self._ended not in (ready := dict(poller.poll())):
                if self._router in ready:
                    self._serve()
        finally:
            self._router.close(linger=0)
            self._ended.close(linger=0)

    def _serve(self) -> None:
        """Answer one request. An error ends that request alone."""
        try:
            self._answer(self._router.recv_multipart())
        except Exception:
            self.failed += 1
            if self._warnings.due("failure", time.monotonic()):
                logger.exception("a request for earlier KV cache events failed (%d so far)", self.failed)

    def _answer(self, frames: Sequence[bytes]) -> None:
        *envelope, request = frames
        if len(request) != SEQUENCE_BYTES or envelope[1:] not in ([], [b""]):
            if self._warnings.due("request", time.monotonic()):
                logger.warning(
                    "ignored a malformed request for earlier KV cache events: it must be 8 bytes, "
                    "the first number wanted"
                )
            return
        first, deadline = int.from_bytes(request, "big"), time.monotonic() + ANSWER_S
        with contextlib.suppress(zmq.ZMQError):  # the follower is gone or does not read
            for number, payload in self._past.batches_since(first):
                if self._closing or time.monotonic() > deadline:
                    return
                self._router.send_multipart([*envelope, *self._topic, sequence_frame(number), payload])
            self._router.send_multipart([*envelope, *[b"" for _ in self._topic], END, b""])
