"""Sends followers the batches they missed, on a thread of its own: a slow follower delays only other replays.

A request is the first sequence number wanted, 8 bytes; the answer is one message for each batch, and one to end it.
REQ and DEALER sockets both may ask: an empty frame before the request comes back before each answer. With events as
maps an answer has the frames of a published message: topic, number, payload; with events as arrays it has no topic.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from uuid import uuid4

import zmq

from ...memory_pool.stores.block_store import RareWarnings
from .past_batches import PastBatches
from .wire import END, SEQUENCE_BYTES, sequence_frame

logger = logging.getLogger(__name__)

MAX_UNREAD = 128
"""Answers that wait for one asker."""

PATIENCE_MS = 1000
"""The longest that a message waits for an asker to read others; then it gets no more, and may ask again."""

ANSWER_S = 10.0
"""The longest that a whole answer takes, for the same reason."""


def replay_socket() -> zmq.Socket:
    """A socket for `ReplayServer`, not bound yet."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, MAX_UNREAD)
    router.setsockopt(zmq.RCVHWM, MAX_UNREAD)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # or what is not read would be dropped in the middle of an answer
    router.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
    router.setsockopt(zmq.MAXMSGSIZE, 256)  # a longer frame ends its connection
    return router


class ReplayServer:
    """Owns the socket and the thread."""

    def __init__(self, router: zmq.Socket, past: PastBatches, topic: bytes | None) -> None:
        """topic: the first frame of each answer; None leaves that frame out."""
        self._router = router
        self._past = past
        self._topic = [] if topic is None else [topic]
        self.failed = 0
        """Requests that were given up because of an error in here."""
        self._closing = False
        self._warnings = RareWarnings()
        address = f"inproc://baton-kv-replay-{uuid4().hex}"
        self._ended, self._end = (zmq.Context.instance().socket(zmq.PAIR) for _ in range(2))
        self._ended.bind(address)
        self._end.connect(address)
        self._thread = threading.Thread(target=self._run, name="kv-events-replay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for a message that is being sent, see `PATIENCE_MS`."""
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
        """One request. Whatever is wrong with it, the next one has its turn."""
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
                logger.warning("a request for earlier KV cache events is 8 bytes, the first number wanted; one is not")
            return
        first, deadline = int.from_bytes(request, "big"), time.monotonic() + ANSWER_S
        with contextlib.suppress(zmq.ZMQError):  # it has gone, or does not read
            for number, payload in self._past.since(first):
                if self._closing or time.monotonic() > deadline:
                    return
                self._router.send_multipart([*envelope, *self._topic, sequence_frame(number), payload])
            self._router.send_multipart([*envelope, *[b"" for _ in self._topic], END, b""])
