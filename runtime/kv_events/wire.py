"""KV cache events as they go over the wire: as vLLM and SGLang publish them, so that their followers can read them.

    frames:  topic | sequence number, 8 bytes, big-endian | payload
    payload: msgpack [seconds, [event, …], rank]

An event has one of two forms, and an answer to a request for earlier batches follows it:

    maps    {"type": "BlockRemoved", "block_hashes": […], "medium": "GPU"}    answers: topic | number | payload
    arrays  ["BlockRemoved", […], "GPU"]                                      answers: number | payload

Maps are the present form (vLLM 0.33, SGLang 0.5.23); servers before them sent the same fields as arrays, in the order
in which the structs below declare them. There are no adapters here, so `lora_id` and `lora_name` are nil.
`extra_keys` is left out of a map, and nil in an array, except where a sequence of a namespace begins: vLLM puts the
salt there, one entry for each block; Baton puts a name that does not reveal the salt. Host memory is `CPU` in a map, as
in vLLM's (vllm-router takes a name it does not know for the device), and `CPU_PINNED`, SGLang's name, in an array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from ...radix.block_events import HOST, AllCleared, BlockEvent, BlocksRemoved, BlocksStored
from ...radix.node import ID_BYTES
from ..config import KVEventForm

SEQUENCE_BYTES = 8
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""The sequence number that ends an answer to a request for earlier batches; its payload is empty."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    """Seconds since 1970."""
    events: list[WireEvent] | list[list[object]]
    data_parallel_rank: int = 0


def as_array(event: WireEvent) -> list[object]:
    """The positional form of an event: its type, then all fields in their order."""
    return [type(event).__name__, *msgspec.structs.astuple(event)]


def sequence_frame(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")


class Packer:
    """Puts events of blocks of so many tokens into payloads."""

    def __init__(self, block_tokens: int, form: KVEventForm = "maps") -> None:
        self._block_tokens = block_tokens
        self._form = form
        self._mediums = {HOST: "CPU"} if form == "maps" else {}
        self._encoder = msgspec.msgpack.Encoder()

    def payload(self, events: Sequence[BlockEvent], seconds: float) -> bytes:
        """seconds: since 1970."""
        on_wire = [self._on_wire(event) for event in events]
        if self._form == "arrays":
            return self._encoder.encode(EventBatch(seconds, [as_array(event) for event in on_wire]))
        return self._encoder.encode(EventBatch(seconds, on_wire))

    def _on_wire(self, event: BlockEvent) -> WireEvent:
        match event:
            case BlocksStored():
                ids = np.frombuffer(event.ids, dtype=np.int32).tolist()
                keys = [[event.scope], *([None] * (len(event.hashes) - 1))] if event.scope else None
                medium = self._medium(event.tier)
                return BlockStored(event.hashes, event.parent, ids, self._block_tokens, None, medium, None, keys)
            case BlocksRemoved():
                return BlockRemoved(event.hashes, self._medium(event.tier))
            case AllCleared():
                return AllBlocksCleared()

    def _medium(self, tier: str) -> str:
        return self._mediums.get(tier, tier)

    def in_batches(self, events: Sequence[BlockEvent], most_blocks: int) -> Iterator[list[BlockEvent]]:
        """The same events in lists of at most so many blocks, in their order."""
        batch, blocks = list[BlockEvent](), 0
        for event in events:
            for piece in self._pieces(event, most_blocks):
                count = 0 if isinstance(piece, AllCleared) else len(piece.hashes)
                if batch and blocks + count > most_blocks:
                    yield batch
                    batch, blocks = [], 0
                batch.append(piece)
                blocks += count
        if batch:
            yield batch

    def _pieces(self, event: BlockEvent, most: int) -> Iterator[BlockEvent]:
        if isinstance(event, AllCleared) or len(event.hashes) <= most:
            yield event
            return
        hashes, size = event.hashes, self._block_tokens * ID_BYTES
        for start in range(0, len(hashes), most):
            part = hashes[start : start + most]
            if isinstance(event, BlocksRemoved):
                yield BlocksRemoved(event.tier, part)
            else:
                ids = event.ids[start * size : (start + most) * size]
                first = start == 0
                parent = event.parent if first else hashes[start - 1]
                yield BlocksStored(event.tier, part, parent, ids, event.scope if first else "")
