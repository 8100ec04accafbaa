"""ZMQ addresses for publishing events: which are accepted, and the check that they are free."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket

import zmq

from ..checkpoint.model_files import ModelLoadError
from ..config import KVEventConfig

logger = logging.getLogger(__name__)

LEAST_BLOCK_TOKENS = 16
"""Smaller pages share a block: an event for each token would cost much and tell a router nothing."""

_WHY = {
    errno.EADDRINUSE: "another process listens there; give each an address of its own",
    errno.EADDRNOTAVAIL: "this machine has no such address; use 127.0.0.1, or * for all it has",
    errno.ENODEV: "this machine has no such address; use 127.0.0.1, or * for all it has",
}


def event_block_tokens(config: KVEventConfig, page_size: int) -> int:
    """Tokens per block in events."""
    return config.kv_events_block_size or max(page_size, LEAST_BLOCK_TOKENS)


def refusal(config: KVEventConfig, page_size: int, *, cached: bool) -> str | None:
    """Error text for contradictory settings, with the change to make; None if they are fine. cached: True with a radix
    cache."""
    if not config.kv_events_endpoint:
        return _refusal_without_endpoint(config)
    if not cached:
        return (
            "--kv-events-endpoint publishes the contents of the radix cache; leave it out, or leave out "
            "--disable-radix-cache"
        )
    if config.kv_events_endpoint == config.kv_events_replay_endpoint:
        return "--kv-events-replay-endpoint is --kv-events-endpoint; give it an address of its own"
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        address = getattr(config, name)
        if address and not _is_address(address):
            flag = "--" + name.replace("_", "-")
            return f"{flag} is {address!r}; it takes tcp://ADDRESS:PORT, such as tcp://127.0.0.1:5557, or ipc://PATH"
    size = config.kv_events_block_size
    if size < 0 or size % page_size:
        return (
            f"--kv-events-block-size is {size}; use a multiple of --page-size {page_size}, or 0 for the page size, "
            f"but at least {LEAST_BLOCK_TOKENS}"
        )
    if config.kv_events_buffer_mb < 1:
        return f"--kv-events-buffer-mb is {config.kv_events_buffer_mb}; use 1 or more"
    return None


def _refusal_without_endpoint(config: KVEventConfig) -> str | None:
    for name in KVEventConfig.__dataclass_fields__:
        if getattr(config, name) != getattr(KVEventConfig, name):
            return f"--{name.replace('_', '-')} is given without --kv-events-endpoint; add that, or leave it out"
    return None


def _is_address(address: str) -> bool:
    if address.startswith("ipc://"):
        return len(address) > len("ipc://")
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    return address.startswith("tcp://") and bool(host and colon) and is_port


def is_private(address: str) -> bool:
    """True if only processes of this machine can reach it."""
    if address.startswith("ipc://"):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def bind(zmq_socket: zmq.Socket, address: str, flag: str) -> str:
    """Bind the socket and return its address, with the port that was found for port 0. Raises ModelLoadError if the
    address cannot be bound."""
    try:
        if address.startswith("ipc://") and _has_listener(address.removeprefix("ipc://")):
            raise ModelLoadError(f"{flag} {address}: another server publishes there; give each an address of its own")
        zmq_socket.setsockopt(zmq.IPV6, int("[" in address))
        zmq_socket.bind(address)
    except zmq.ZMQError as error:
        zmq_socket.close(linger=0)
        raise ModelLoadError(f"{flag} {address}: {_WHY.get(error.errno or 0, str(error))}") from error
    except ModelLoadError:
        zmq_socket.close(linger=0)
        raise
    if not is_private(address):
        logger.warning(
            "%s %s can be reached from other machines: any process that connects reads the token ids of all prompts "
            "and outputs, without a key",
            flag,
            address,
        )
    return zmq_socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _has_listener(path: str) -> bool:
    """True if a server listens at this path. ZMQ would take the path from it, as from a server that has ended."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
