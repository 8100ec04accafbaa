"""ZMQ push/pull pairs that carry msgspec structs as msgpack between the parts of a server.

    TokenizerManager ──to_worker──▶ worker ──to_detokenizer──▶ detokenizer ──to_manager──▶ TokenizerManager

The receiver binds, the senders connect. The same code serves processes (``ipc://``, or loopback TCP where Unix sockets
do not work) and threads of one process (``inproc://``). Nothing here knows which messages exist, and nothing is
pickled: a receiver is given the union of message types it accepts, and anything else raises.

Queues are unbounded: the open requests bound what they hold, and a worker that blocked because one client reads slowly
would stop all other requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import uuid4

import msgspec
import zmq
import zmq.asyncio

MessageT = TypeVar("MessageT")

logger = logging.getLogger(__name__)

_WAKE = b""
"""An empty frame, which only ends a poll early."""

_LINGER_MS = 1000
"""Time for which a closed sender still delivers its queued messages."""


class ChannelError(RuntimeError):
    """An address cannot be bound, or a frame is not one of the messages its receiver accepts."""


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of one server's three channels, each named after the part that receives."""

    to_worker: str
    to_detokenizer: str
    to_manager: str

    @classmethod
    def for_threads(cls) -> Endpoints:
        """Addresses that only this process can reach."""
        name = uuid4().hex
        return cls(**{channel: f"inproc://baton-{name}-{channel}" for channel in cls.__struct_fields__})

    @property
    def are_of_threads(self) -> bool:
        return self.to_worker.startswith("inproc:")

    @classmethod
    def for_processes(cls, run_dir: Path) -> Endpoints:
        """Unix sockets in ``run_dir``; loopback TCP on free ports where Unix sockets cannot be bound there."""
        channels = list(cls.__struct_fields__)
        if all(_can_bind(run_dir / channel) for channel in channels):
            return cls(**{channel: f"ipc://{run_dir / channel}" for channel in channels})
        logger.warning(
            "no Unix socket can be bound in %s; the processes communicate over loopback TCP, which other users of this "
            "machine can reach: set TMPDIR or XDG_RUNTIME_DIR to a folder that can hold one",
            run_dir.parent,
        )
        return cls(**_free_tcp_addresses(channels))


def run_dir_candidates() -> list[Path]:
    """Candidate paths for `make_run_dir`, in order of preference. None exists yet."""
    name = f"baton-{secrets.token_hex(4)}"
    # Not tempfile.gettempdir(), which tries folders out by writing files there.
    folders = [os.environ.get("TMPDIR") or "/tmp", os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm"]
    return [Path(folder) / name for folder in folders if folder and os.access(folder, os.W_OK)]


def make_run_dir(candidates: list[Path]) -> Path:
    """Make the first directory, mode 0700, in which a Unix socket can be bound: for one server's sockets.

    A Unix socket's path is limited to 107 bytes, and some machines mount /tmp so that sockets cannot live there.
    Where no candidate works, the first one is returned and `Endpoints.for_processes` falls back to TCP.
    """
    for run_dir in candidates:
        run_dir.mkdir(mode=0o700)
        if _can_bind(run_dir / max(Endpoints.__struct_fields__, key=len)):
            return run_dir
        run_dir.rmdir()
    candidates[0].mkdir(mode=0o700)
    return candidates[0]


class Sender:
    """The sending end of a channel. Not shared between threads."""

    holds = False
    """Keep messages until `flush`, for a receiver that is a thread of this process: waking it costs the sender the
    interpreter's lock, so the sender chooses when."""

    def __init__(self, address: str) -> None:
        self._socket = _zmq_socket(zmq.PUSH)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._held: list[bytes] = []

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; never blocks. It is dropped if the receiver has closed: its owner has ended, and the
        supervisor ends the rest."""
        self.send_packed(self.packed(message))

    def packed(self, message: msgspec.Struct) -> bytes:
        """The message as `send_packed` takes it. Raises OverflowError or UnicodeEncodeError for values that fit no
        message."""
        return self._encoder.encode(message)

    def send_packed(self, frame: bytes) -> None:
        """`send` for a packed message. Cannot fail."""
        self._send(frame)

    def wake(self) -> None:
        """End the receiver's poll now, with no message."""
        self._send(_WAKE)

    def flush(self) -> None:
        """Deliver the held messages."""
        held, self._held = self._held, []
        for frame in held:
            self._deliver(frame)

    def _send(self, frame: bytes) -> None:
        if self.holds:
            self._held.append(frame)
        else:
            self._deliver(frame)

    def _deliver(self, frame: bytes) -> None:
        # Queues are unbounded, so "try again" can only mean that there is no receiver (within a process).
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        self.flush()
        self._socket.close(linger=_LINGER_MS)


class Waker:
    """Ends the poll of a `Receiver` of this process, from any thread. Does nothing once closed."""

    def __init__(self, address: str) -> None:
        """address: that of the receiver, which must exist."""
        self._sender: Sender | None = Sender(_wake_address(address))
        self._lock = threading.Lock()

    def wake(self) -> None:
        with self._lock:  # which is also the fence that a socket needs to go from thread to thread
            if self._sender is not None:
                self._sender.wake()

    def close(self) -> None:
        """Close the sender. A thread that hangs may still call `wake` later."""
        with self._lock:
            if self._sender is not None:
                self._sender.close()
            self._sender = None


class Receiver(Generic[MessageT]):
    """The receiving end of a channel, for a thread that polls. ``message_type``: the union of messages it accepts."""

    def __init__(self, address: str, message_type: Any) -> None:
        self._socket = _zmq_socket(zmq.PULL)
        self._address = address
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(message_type)
        _bind(self._socket, address)
        if (wake_address := _wake_address(address)) != address:
            _bind(self._socket, wake_address)

    def poll(self, timeout_s: float = 0.0) -> list[MessageT]:
        """Return all waiting messages in order of arrival; wait up to ``timeout_s`` seconds for the first.

        Returns [] on a timeout or a wake-up. Raises ChannelError for a frame that is not an accepted message.
        """
        if not self._socket.poll(max(0, round(timeout_s * 1000))):
            return []
        messages = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            if frame != _WAKE:
                messages.append(_decode(self._decoder, frame, self._address))

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncReceiver(Generic[MessageT]):
    """The receiving end of a channel, for an asyncio loop."""

    def __init__(self, address: str, message_type: Any) -> None:
        self._socket = _zmq_socket(zmq.PULL)
        self._address = address
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(message_type)
        _bind(self._socket, address)
        self._waiter = zmq.asyncio.Socket.shadow(self._socket)

    async def receive(self) -> list[MessageT]:
        """Wait until something arrives, then return everything that waits ([] for a mere wake-up).

        Raises ChannelError like `Receiver.poll`.
        """
        frames = [await self._waiter.recv()]
        # The rest is read from the plain socket: a future per waiting frame would cost more than the frame.
        with contextlib.suppress(zmq.Again):
            while True:
                frames.append(self._socket.recv(zmq.NOBLOCK))
        return [_decode(self._decoder, frame, self._address) for frame in frames if frame != _WAKE]

    def close(self) -> None:
        self._waiter.close(linger=0)
        self._socket.close(linger=0)


def _zmq_socket(kind: int) -> zmq.Socket:
    # One context per process, because inproc addresses exist within a context.
    zmq_socket = zmq.Context.instance().socket(kind)
    zmq_socket.setsockopt(zmq.SNDHWM, 0)
    zmq_socket.setsockopt(zmq.RCVHWM, 0)
    return zmq_socket


def _wake_address(address: str) -> str:
    """Connections within a process exist at once. One to a Unix socket is made in the background: if the run directory
    is removed meanwhile, never."""
    return address if address.startswith("inproc:") else f"inproc://wake-{address}"


def _bind(zmq_socket: zmq.Socket, address: str) -> None:
    try:
        zmq_socket.bind(address)
    except zmq.ZMQError as error:
        zmq_socket.close(linger=0)
        raise ChannelError(f"cannot bind {address}: {error}") from error


def _decode(decoder: msgspec.msgpack.Decoder[MessageT], frame: bytes, address: str) -> MessageT:
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise ChannelError(f"{address} received a frame of {len(frame)} bytes it does not accept: {error}") from error


# Addresses are probed with plain sockets: ZMQ closes its own in the background, and would later unlink the file or
# still hold the port that the real receiver has bound by then.


def _can_bind(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(str(path))
        except OSError:  # too long a path, or a file system without sockets
            return False
    path.unlink()
    return True


def _free_tcp_addresses(channels: list[str]) -> dict[str, str]:
    """Ports are probed all at once, so that no two channels get the same one."""
    with contextlib.ExitStack() as probes:
        addresses = {}
        for channel in channels:
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            addresses[channel] = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        return addresses
