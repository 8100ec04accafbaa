"""How a block stands on a Redis server, and how it gets there and back.

    baton-kv:VERSION:<digest of the model>:<key>  →  header, payload (block_frame.py)

A block is read in pieces: one big reply would be copied in one go, with the GIL, and could not be given up half-way.
"""

from __future__ import annotations

from collections.abc import Callable

from .block_frame import HEADER_BYTES, VERSION, BlockFrame, DamagedBlock
from .redis_link import SOCKET_BYTES, LinkError, RedisLink, Refusal


class RemoteValues:
    """One model's values, over one connection. What is asked for must be received in the same order.

    ttl_s: after how many seconds without use the server forgets a block; None: see `RemoteStore`.
    """

    def __init__(self, link: RedisLink, frame: BlockFrame, ttl_s: int | None) -> None:
        self._prefix = f"baton-kv:{VERSION}:{frame.model.hex()}:".encode()
        self._link = link
        self._frame = frame
        self._ttl_s = ttl_s

    def name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def send(self, key: bytes, payload: memoryview) -> None:
        """Raises LinkError. One reply."""
        expiry = () if self._ttl_s is None else (b"EX", self._ttl_s)
        self._link.send(b"SET", self.name(key), (self._frame.header(key, payload), payload), *expiry)

    def use(self, key: bytes) -> None:
        """Put off the end of a block that has one; of others read a byte, as what is read is evicted later. Raises
        LinkError. One reply."""
        if self._ttl_s is None:
            self._link.send(b"GETRANGE", self.name(key), 0, 0)
        else:
            self._link.send(b"EXPIRE", self.name(key), self._ttl_s)

    def ask_for(self, key: bytes) -> None:
        """Raises LinkError. The replies are for `receive`."""
        name, end = self.name(key), self._frame.framed_bytes
        self._link.send(b"GETRANGE", name, 0, HEADER_BYTES - 1)
        for at in range(HEADER_BYTES, end, SOCKET_BYTES):
            last = min(at + SOCKET_BYTES, end) - 1
            self._link.send(b"GETRANGE", name, at, last + (last == end - 1))  # a byte more, to see that there is none
        if self._ttl_s is not None:
            self.use(key)

    def receive(self, key: bytes, room: memoryview, wanted: Callable[[], bool]) -> bool:
        """Receive a block and check it. False: it is not there. Raises DamagedBlock or LinkError. Unless this is true,
        replies are left over, and what ``room`` holds means nothing.

        room: writable bytes [block_bytes]. wanted: whether to go on.
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
