"""A follower of KV cache events, written from docs/kv_events.md: sockets, sequence numbers, and what is where."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zmq

from baton.radix.block_events import AllCleared, BlockEvent, BlocksRemoved, BlocksStored
from tests.doubles import plain_msgpack
from tests.doubles.block_mirror import BlockMirror

WAIT_MS = 20_000
END = b"\xff" * 8
TIERS = {"GPU": "GPU", "CPU": "CPU_PINNED"}
"""Tiers by the names they have in events that are maps."""


def read_batch(payload: bytes, block_tokens: int) -> list[BlockEvent]:
    seconds, events, rank = plain_msgpack.read(payload)
    assert isinstance(seconds, float) and rank == 0
    return [_read(event, block_tokens) for event in events]


def _read(event: dict[str, Any] | list[Any], block_tokens: int) -> BlockEvent:
    match event:
        case {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": ids, **others}:
            others: dict[str, Any] = {"extra_keys": None} | others
            assert [*others] == ["extra_keys", "block_size", "lora_id", "medium", "lora_name"]
            assert others["lora_id"] is others["lora_name"] is None
            tier, size = TIERS[others["medium"]], others["block_size"]
            return _stored(hashes, parent, ids, size, tier, others["extra_keys"], block_tokens)
        case ["BlockStored", hashes, parent, ids, size, None, tier, None, keys]:
            return _stored(hashes, parent, ids, size, tier, keys, block_tokens)
        case {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **others} if not others:
            return BlocksRemoved(TIERS[medium], hashes)
        case ["BlockRemoved", hashes, tier]:
            return BlocksRemoved(tier, hashes)
        case ["AllBlocksCleared"]:
            return AllCleared()
        case {"type": "AllBlocksCleared", **others} if not others:
            return AllCleared()
    raise AssertionError(f"no such event: {event}")


def _stored(
    hashes: list[int], parent: int | None, ids: list[int], size: int, tier: str, keys: Any, block_tokens: int
) -> BlocksStored:
    assert size == block_tokens and tier in ("GPU", "CPU_PINNED", "DISK")
    scope = ""
    if keys is not None:
        [scope], *others = keys
        assert others == [None] * (len(hashes) - 1)
    return BlocksStored(tier, hashes, parent, np.array(ids, dtype=np.int32).tobytes(), scope)


def ask(address: str, first: int, topic: bytes | None = b"") -> list[tuple[int, bytes]]:
    """The batches that a server sends again, from number ``first`` on. topic: the frame that each answer begins with;
    None: no such frame, as servers answer whose events are arrays."""
    answers: list[tuple[int, bytes]] = []
    with contextlib.closing(zmq.Context.instance().socket(zmq.DEALER)) as dealer:
        dealer.linger = 0
        dealer.connect(address)
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert dealer.poll(WAIT_MS), "no answer"
            empty, *before, number, payload = dealer.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b"" and before == ([] if topic is None else [b""])
                return answers
            assert before == ([] if topic is None else [topic])
            answers.append((int.from_bytes(number, "big"), payload))


class Follower:
    """Applies batches in their order. ``last`` is the number of the last one."""

    def __init__(self, address: str, replay: str, block_tokens: int, topic: bytes = b"", slow: bool = False) -> None:
        self.mirror = BlockMirror(block_tokens)
        self.last = -1
        self.heard = 0
        """Batches that came by themselves."""
        self._replay = replay
        self._block_tokens = block_tokens
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.linger = 0
        if slow:  # hardly anything waits on this side
            self._socket.rcvhwm, self._socket.rcvbuf = 5, 1 << 16
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._socket.connect(address)
        self._topic = topic

    def catch_up(self) -> None:
        for number, payload in ask(self._replay, self.last + 1, self._topic):
            self.apply(number, payload)

    def apply(self, number: int, payload: bytes) -> list[BlockEvent]:
        if number <= self.last:
            return []
        events = read_batch(payload, self._block_tokens)
        self.mirror.apply(events)
        self.last = number
        return events

    def receive(self, timeout_ms: int = WAIT_MS) -> list[BlockEvent]:
        """The events of the next batch; asks for those before it that did not come."""
        assert self._socket.poll(timeout_ms), "no batch"
        topic, number, payload = self._socket.recv_multipart()
        assert topic == self._topic and len(number) == 8
        self.heard += 1
        if (seen := int.from_bytes(number, "big")) > self.last + 1:
            self.catch_up()
        return self.apply(seen, payload)

    def receive_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.receive()

    def close(self) -> None:
        self._socket.close(linger=0)


@contextlib.contextmanager
def following(
    address: str, replay: str, block_tokens: int, topic: bytes = b"", slow: bool = False
) -> Iterator[Follower]:
    follower = Follower(address, replay, block_tokens, topic, slow)
    try:
        yield follower
    finally:
        follower.close()
