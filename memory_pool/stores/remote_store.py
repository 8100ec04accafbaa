"""Blocks of KV on a Redis server, which servers of the same model share.

A `BlockStore`. A block stands on the server as one value:

    baton-kv:VERSION:<digest of the model>:<key>  →  header, payload (block_frame.py)

Names are digests (block_keys.py): no token ids, no namespaces. A value that is not what its name says is a miss and is
removed. The checksum finds accidents, not malice: anyone with write access to the server can change answers, and anyone
with read access reads the users' text in another form.

A server that is dead or slow costs hits and nothing else. Each call of the socket has a time-out; after FAILURES_IN_ROW
failures the server is not used for PAUSE_S. A block is read in pieces: one big reply would be copied in one go while
holding the GIL, and could not be abandoned half-way when the deadline of its load has passed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .block_frame import HEADER_BYTES, VERSION, BlockFrame, DamagedBlock, check_key
from .block_keys import model_digest
from .block_store import BlockSource, BlockTarget, RareWarnings
from .redis_link import SOCKET_BYTES, LinkError, RedisLink, Refusal, RemoteStoreError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 0.5
TIMEOUT_S = 1.0
"""For each call of the socket."""
FAILURES_IN_ROW = 3
PAUSE_S = 10.0
"""Seconds without any call after that many failures, and without writes after the server refused one."""

BATCH_BYTES = 2**23
"""Bytes that are requested, or sent, before waiting for replies."""
MAX_VALUE_BYTES = 2**29
"""The largest value that Redis accepts."""
KNOWN_KEYS = 2**16
"""Most keys that are remembered as stored."""
TOUCH_S = 60.0
"""Least seconds between two renewals of a block's use on the server; fewer for a short time to live."""

FAILURES = ("unreachable", "timeout", "login", "answer", "refused", "late", "size", "header", "checksum")
"""Failures of the server: not reachable, too slow, login refused, an answer that is not Redis's, a refused command, a
load that ran past its deadline while its block was read. Failures of values: wrong size, wrong header, wrong
checksum."""


@dataclass(slots=True)
class RemoteStats:
    """Counts since the start."""

    hits: int = 0
    """Blocks read."""
    misses: int = 0
    """Blocks that ended a load: missing, damaged, or not readable."""
    writes: int = 0
    writes_present: int = 0
    """Blocks not sent because the server had them."""
    bytes_read: int = 0
    bytes_written: int = 0
    skipped: int = 0
    """Loads and blocks to store that were not tried because the server had just failed."""
    pauses: int = 0
    """Pauses after FAILURES_IN_ROW failures."""
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURES, 0))
    """Failures by kind."""


class Breaker:
    """A circuit breaker: after ``limit`` failures in a row it allows no call for ``pause_s`` seconds.

    The next call is a trial: its success closes the breaker, its failure opens it again.
    """

    def __init__(self, limit: int, pause_s: float) -> None:
        self.pause_s = pause_s
        self._limit = limit
        self._failures = 0
        self._open_until = float("-inf")

    def allows(self, now: float) -> bool:
        return now >= self._open_until

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, now: float) -> bool:
        """Count a failure. Returns True if it opened the breaker."""
        self._failures += 1
        if self._failures < self._limit:
            return False
        self._open_until = now + self.pause_s
        return True


class RemoteValues:
    """One model's values, over one connection. Replies must be received in the order of the requests.

    ttl_s: seconds without use after which the server forgets a block; None: see `RemoteStore`.
    """

    def __init__(self, link: RedisLink, frame: BlockFrame, ttl_s: int | None) -> None:
        self._prefix = f"baton-kv:{VERSION}:{frame.model.hex()}:".encode()
        self._link = link
        self._frame = frame
        self._ttl_s = ttl_s

    def name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def send_block(self, key: bytes, payload: memoryview) -> None:
        """Send a block to be stored; one reply follows. Raises LinkError."""
        expiry = () if self._ttl_s is None else (b"EX", self._ttl_s)
        self._link.send(b"SET", self.name(key), (self._frame.header(key, payload), payload), *expiry)

    def touch_block(self, key: bytes) -> None:
        """Renew a block's time to live; without one, read a byte of it, so that it is evicted later. One reply follows.
        Raises LinkError."""
        if self._ttl_s is None:
            self._link.send(b"GETRANGE", self.name(key), 0, 0)
        else:
            self._link.send(b"EXPIRE", self.name(key), self._ttl_s)

    def request_block(self, key: bytes) -> None:
        """Request a block; `receive_block` takes the replies. Raises LinkError."""
        name, end = self.name(key), self._frame.framed_bytes
        self._link.send(b"GETRANGE", name, 0, HEADER_BYTES - 1)
        for at in range(HEADER_BYTES, end, SOCKET_BYTES):
            last = min(at + SOCKET_BYTES, end) - 1
            self._link.send(b"GETRANGE", name, at, last + (last == end - 1))  # a byte more, to see that there is none
        if self._ttl_s is not None:
            self.touch_block(key)

    def receive_block(self, key: bytes, room: memoryview, wanted: Callable[[], bool]) -> bool:
        """Receive a block and check it. False: it is not there. Raises DamagedBlock or LinkError. Unless it returns
        True, replies are left over, and the contents of ``room`` mean nothing.

        room: writable bytes [block_bytes]. wanted: cancellation check, False to stop.
        """
        header = self._piece(HEADER_BYTES)
        if not header:
            return False
        for at in range(0, self._frame.block_bytes, SOCKET_BYTES):
            if at and not wanted():
                raise LinkError("late", "a load's time was up while its block was read")
            part = room[at : at + SOCKET_BYTES]
            piece = self._piece(len(part))
            if not piece:  # the value is no longer than this, or was removed meanwhile
                raise DamagedBlock("size")
            part[:] = piece
        if self._ttl_s is not None:
            self._link.receive()
        self._frame.check(key, header, room)
        return True

    def _piece(self, size: int) -> bytes:
        """A part of a value, of that size or empty. Raises DamagedBlock or LinkError."""
        piece = self._link.receive()
        if isinstance(piece, Refusal) and piece.text.startswith("WRONGTYPE"):
            raise DamagedBlock("header")
        if not isinstance(piece := self._link.must(piece), bytes):
            raise LinkError("answer", f"a part of a value is bytes, not {type(piece).__name__}")
        if len(piece) not in (0, size):
            raise DamagedBlock("size")
        return piece


class RemoteStore:
    """Owns the connection. Raises RemoteStoreError for what cannot work; connects with the first call that does I/O.

    url: of the Redis server (`RedisLink`). fingerprint: see `model_digest`; block_bytes must follow from it.
    ttl_s: how long the server keeps an unused block; None: until it needs the room (its maxmemory-policy).
    """

    def __init__(
        self,
        url: str,
        block_bytes: int,
        fingerprint: bytes,
        *,
        ttl_s: int | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        frame = BlockFrame(model_digest(fingerprint), block_bytes)
        if frame.framed_bytes > MAX_VALUE_BYTES:
            raise RemoteStoreError(
                f"a block of {block_bytes} bytes does not fit into a value of Redis, of {MAX_VALUE_BYTES} bytes with "
                f"its {HEADER_BYTES} of header: use fewer tokens per block"
            )
        if ttl_s is not None and ttl_s < 1:
            raise RemoteStoreError(f"the remote store keeps blocks for at least 1 second, not {ttl_s}")
        self.block_bytes = block_bytes
        self.store_batch = max(BATCH_BYTES // block_bytes, 1)
        self.stats = RemoteStats()
        self._known: dict[bytes, float] = {}
        """Keys that were there at the last reply, oldest reply first -> when the server was last told of their use."""
        self._touch_s = TOUCH_S if ttl_s is None else min(TOUCH_S, ttl_s / 4)
        self._link = RedisLink(url, connect_timeout_s, timeout_s)
        self._values = RemoteValues(self._link, frame, ttl_s)
        self._breaker = Breaker(FAILURES_IN_ROW, PAUSE_S)
        self._no_writes_until = float("-inf")
        self._warnings = RareWarnings()

    @property
    def address(self) -> str:
        """Where the server is, for logs: without user and password."""
        return self._link.address

    def connect(self, now: float) -> bool:
        """Try the server at the start. False: it is not there, which is logged, and it will be tried again. Raises
        RemoteStoreError if the login or a permission is refused."""
        try:
            self._link.ask(b"PING")
        except LinkError as error:
            if error.kind in ("login", "refused"):
                raise RemoteStoreError(
                    f"cannot log in to the remote store at {self.address}: {error}; check user, password and "
                    "database in its URL, and this user's permissions"
                ) from None
            self._failed(error, now)
            return False
        return True

    def close(self) -> None:
        """Close the connection. No other call may be running."""
        self._link.reset()

    # -- without I/O ---------------------------------------------------------------------------------------------------

    def size(self) -> None:
        """The server may hold blocks of others, and drops blocks by itself."""

    def contains(self, key: bytes) -> bool:
        """True if the block was there at the last reply about it. Blocks of other servers are unknown before they are
        used."""
        return key in self._known

    # -- with I/O ------------------------------------------------------------------------------------------------------

    def find_blocks(self, keys: Sequence[bytes], now: float) -> int:
        """The number of leading blocks that are there: one round trip."""
        if not keys or not self._allowed(now):
            return 0
        try:
            there = self._exist(keys)
        except LinkError as error:
            self._failed(error, now)
            return 0
        self._breaker.succeeded()
        return (*there, False).index(False)

    def read_blocks(self, keys: Sequence[bytes], target: BlockTarget, now: float) -> int:
        """Read consecutive blocks of one sequence, BATCH_BYTES per round trip. Returns the number of leading blocks
        that were accepted."""
        if not keys or not self._allowed(now):
            return 0
        count = 0
        try:
            for _ in self._read(keys, target, now):
                count += 1
            self._breaker.succeeded()
        except LinkError as error:
            self._failed(error, now)
        finally:
            if self._link.pending:
                self._link.reset()
        self.stats.hits += count
        self.stats.misses += count < len(keys)
        self.stats.bytes_read += count * self.block_bytes
        return count

    def write_blocks(self, keys: Sequence[bytes], source: BlockSource, now: float) -> list[bool]:
        """Store blocks that the server does not have, in two round trips. Returns for each whether it is there
        afterwards."""
        for key in keys:
            check_key(key)
        done = [False] * len(keys)
        if not keys or not self._allowed(now, len(keys)):
            return done
        if now < self._no_writes_until:
            self.stats.skipped += len(keys)
            return done
        try:
            done = self._exist(keys)
            absent = [index for index, there in enumerate(done) if not there]
            self.stats.writes_present += len(keys) - len(absent)
            for index in absent:
                self._values.send_block(keys[index], source.block(index).data)
            for index in absent:
                done[index] = self._was_stored(keys[index], self._link.receive(), now)
            self._breaker.succeeded()
        except LinkError as error:
            self._failed(error, now)
        finally:
            if self._link.pending:
                self._link.reset()
        return done

    def touch_blocks(self, keys: Sequence[bytes], now: float) -> None:
        """Renew the use of blocks on the server, unless that was done lately. Blocks that it has lost are known
        afterwards, and can be stored again."""
        due = [key for key in keys if now - self._known.get(key, float("-inf")) >= self._touch_s]
        if not due or not self._breaker.allows(now):
            return
        try:
            for key in due:
                self._values.touch_block(key)
            for key in due:
                reply = self._link.receive()
                if not isinstance(reply, Refusal):
                    self._heard(key, bool(reply), now)
            self._breaker.succeeded()
        except LinkError as error:
            self._failed(error, now)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        for key in keys:
            self._link.send(b"EXISTS", self._values.name(key))
        there = [bool(reply) for reply in self._receive_all()]
        for key, exists in zip(keys, there):
            self._heard(key, exists)
        return there

    def _receive_all(self) -> list[int]:
        return [self._link.must(self._link.receive()) for _ in range(self._link.pending)]

    def _heard(self, key: bytes, exists: bool, told: float = float("-inf")) -> None:
        """told: when the server was told of its use, if it was."""
        told = max(told, self._known.pop(key, told))
        if exists:
            self._known[key] = told
            if len(self._known) > KNOWN_KEYS:
                del self._known[next(iter(self._known))]

    def _read(self, keys: Sequence[bytes], target: BlockTarget, now: float) -> Iterator[int]:
        """Reads block after block and gives the index of each that was accepted. Raises LinkError."""
        for start in range(0, len(keys), self.store_batch):
            batch = keys[start : start + self.store_batch]
            if not target.wanted():
                return
            for key in batch:
                self._values.request_block(key)
            for index, key in enumerate(batch, start):
                if index > start and not target.wanted():
                    return
                if not self._receive_block(key, target, index, now):
                    return
                yield index

    def _receive_block(self, key: bytes, target: BlockTarget, index: int, now: float) -> bool:
        """Returns True if the block was accepted. Raises LinkError."""
        room = target.room(index)
        try:
            there = self._values.receive_block(key, room.data, target.wanted)
        except DamagedBlock as damage:
            self._heard(key, False)
            self._drain(target)
            self._damaged(key, damage.kind, now)
            return False
        self._heard(key, there, now)
        if not there:
            self._drain(target)
            return False
        target.accept(index)
        return True

    def _drain(self, target: BlockTarget) -> None:
        """Receive and discard the pending replies, to keep the connection."""
        while self._link.pending and target.wanted():
            self._link.receive()

    def _was_stored(self, key: bytes, reply: object, now: float) -> bool:
        if isinstance(reply, Refusal):
            self._no_writes_until = now + PAUSE_S
            if self._fails("refused", now):
                logger.warning(
                    "the remote store at %s refused a block of KV; pausing writes for %d s: %s (%d so far)",
                    self.address, PAUSE_S, reply.text, self.stats.failures["refused"],
                )  # fmt: skip
            return False
        self._heard(key, True, now)
        self.stats.writes += 1
        self.stats.bytes_written += self.block_bytes
        return True

    # -- failures ------------------------------------------------------------------------------------------------------

    def _allowed(self, now: float, tries: int = 1) -> bool:
        if self._breaker.allows(now):
            return True
        self.stats.skipped += tries
        return False

    def _failed(self, error: LinkError, now: float) -> None:
        self._link.reset()
        paused = self._breaker.failed(now)
        self.stats.pauses += paused
        if self._fails(error.kind, now):
            logger.warning(
                "the remote store at %s failed: %s (%s, %d so far); after %d failures in a row it is not used for %d s",
                self.address, error, error.kind, self.stats.failures[error.kind], FAILURES_IN_ROW, PAUSE_S,
            )  # fmt: skip

    def _damaged(self, key: bytes, kind: str, now: float) -> None:
        """Remove a value that is not the block of its name; otherwise the block could not be stored again."""
        if self._fails(kind, now):
            logger.warning(
                "cannot use a block of KV in the remote store at %s; recomputing it: %s (%s, %d so far)",
                self.address, key.hex(), kind, self.stats.failures[kind],
            )  # fmt: skip
        if not self._link.pending:
            self._link.send(b"UNLINK", self._values.name(key))
            self._link.receive()

    def _fails(self, kind: str, now: float) -> bool:
        """Count a failure. Returns True if it should be logged."""
        self.stats.failures[kind] += 1
        return self._warnings.due(kind, now)
