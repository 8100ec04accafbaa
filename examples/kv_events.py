r"""Follows a server's KV cache, as a router would, and prints the cached part of a prompt.

    baton-server --model-path examples/toy_model --kv-events-endpoint tcp://127.0.0.1:5557 \
        --kv-events-replay-endpoint tcp://127.0.0.1:5558
    python examples/kv_events.py                            every event, until Ctrl-C
    python examples/kv_events.py --hit 12,7,9,…             the hit that these token ids would get, and end

It imports nothing from Baton: docs/kv_events.md describes everything that a follower needs, and servers of vLLM and
SGLang can be followed just as well.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

END = b"\xff" * 8
"""Ends an answer of the replay endpoint."""


FIELDS = {
    "BlockStored": (
        *(
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
        ),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Field names of an event sent as an array, as by --kv-events-format arrays and older versions of vLLM and SGLang."""


def decode(payload: bytes) -> list[dict[str, Any]]:
    """The events of a batch, each with its fields by name."""
    _, events, *_ = msgspec.msgpack.decode(payload)
    return [
        event if isinstance(event, dict) else {"type": event[0], **dict(zip(FIELDS[event[0]], event[1:]))}
        for event in events
    ]


class Mirror:
    """Which blocks are on which tier. A block is known by its place: the hash of the one before it, and its ids."""

    def __init__(self) -> None:
        self.block_size = 0
        self.places: dict[tuple[int | None, tuple[int, ...]], int] = {}
        self.blocks: dict[int, tuple[tuple[int | None, tuple[int, ...]], set[str]]] = {}

    def apply(self, event: dict[str, Any]) -> None:
        match event:
            case {"type": "BlockStored", "extra_keys": [_, *_]}:
                pass  # of a namespace: no prompt without its salt finds it
            case {"type": "BlockStored", "block_hashes": hashes, "token_ids": ids, "block_size": size, "medium": tier}:
                self.block_size = size
                self.store(hashes, event["parent_block_hash"], ids, tier)
            case {"type": "BlockRemoved", "block_hashes": hashes, "medium": tier}:
                for name in hashes:
                    self.remove(name, tier)
            case {"type": "AllBlocksCleared"}:
                self.places.clear()
                self.blocks.clear()

    def store(self, hashes: list[int], parent: int | None, ids: list[int], tier: str) -> None:
        if parent is not None and parent not in self.blocks:
            return  # it follows what is not followed
        for number, name in enumerate(hashes):
            place = parent, tuple(ids[number * self.block_size : (number + 1) * self.block_size])
            self.blocks.setdefault(name, (place, set()))[1].add(tier)
            self.places[place] = parent = name

    def remove(self, name: int, tier: str) -> None:
        if name in self.blocks:
            place, tiers = self.blocks[name]
            tiers.discard(tier)
            if not tiers:
                del self.blocks[name], self.places[place]

    def hit(self, ids: list[int]) -> dict[str, int]:
        """By tier, the leading tokens of a prompt that are there; each counts for the fastest tier that has it."""
        tokens: dict[str, int] = {}
        parent: int | None = None
        for start in range(0, len(ids) - self.block_size + 1, self.block_size or len(ids) + 1):
            parent = self.places.get((parent, tuple(ids[start : start + self.block_size])))
            if parent is None:
                break
            tiers = self.blocks[parent][1]
            fastest = "GPU" if "GPU" in tiers else min(tiers)
            tokens[fastest] = tokens.get(fastest, 0) + self.block_size
        return tokens


class Follower:
    """Batches in the order of their numbers, across restarts of the server."""

    def __init__(self, endpoint: str, replay: str, topic: str) -> None:
        self.last = -1
        self._replay = replay
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        yield from self.missed()  # what was there before
        heard: int | None = None
        while True:
            _, frame, payload = self._socket.recv_multipart()
            number = int.from_bytes(frame, "big")
            if number <= (self.last if heard is None else min(heard, self.last)):
                self.last = -1  # numbers of one server only grow: this is another, with a clock that is behind
            heard = number
            if number > self.last + 1:
                yield from self.missed()  # of the same server, or all of another
            if number > self.last:
                self.last = number
                yield decode(payload)

    def missed(self) -> Iterator[list[dict[str, Any]]]:
        with contextlib.closing(zmq.Context.instance().socket(zmq.DEALER)) as dealer:
            dealer.linger = 0
            dealer.connect(self._replay)
            dealer.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
            while dealer.poll(5000):
                *_, frame, payload = dealer.recv_multipart()  # a topic before them, or not: that depends on the server
                if frame == END:
                    return
                self.last = int.from_bytes(frame, "big")
                yield decode(payload)
        raise SystemExit(f"{self._replay} does not answer")


def main() -> None:
    parser = argparse.ArgumentParser(description="Follow the KV cache of a server.")
    parser.add_argument("--endpoint", default="tcp://127.0.0.1:5557")
    parser.add_argument("--replay", default="tcp://127.0.0.1:5558")
    parser.add_argument("--topic", default="")
    parser.add_argument("--hit", help="token ids with commas between them")
    options = parser.parse_args()
    follower, mirror = Follower(options.endpoint, options.replay, options.topic), Mirror()
    if options.hit:
        for events in follower.missed():
            for event in events:
                mirror.apply(event)
        ids = [int(part) for part in options.hit.split(",")]
        print(f"of {len(ids)} tokens are cached, by tier: {mirror.hit(ids)}")
        return
    with contextlib.suppress(KeyboardInterrupt):
        for events in follower.batches():
            for event in events:
                mirror.apply(event)
                shown = {name: len(value) if isinstance(value, list) else value for name, value in event.items()}
                print(f"batch {follower.last}: {shown}, {len(mirror.blocks)} blocks now", flush=True)


if __name__ == "__main__":
    main()
