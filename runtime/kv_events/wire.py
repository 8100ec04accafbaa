"""KV cache events as they go over the wire: what vLLM and SGLang publish, so that their followers can read it.

    frames:  topic | sequence number, 8 bytes, big-endian | payload
    payload: msgpack [seconds, [event, …], rank]
    event:   ["BlockStored", hashes, parent hash, token ids, block size, adapter id, tier, adapter name, extra keys]
             ["BlockRemoved", hashes, tier]
             ["AllBlocksCleared"]

Arrays, not maps: all followers read these, and they may be longer than one expects. There are no adapters here, so
those two are nil. So are the extra keys, but where a sequence of a namespace begins: vLLM has the salt there, one entry
for each block; here it is a name that does not tell the salt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from ...radix.events.block_events import AllCleared, BlockEvent, BlocksRemoved, BlocksStored
from ...radix.node import ID_BYTES

SEQUENCE_BYTES = 8
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""The sequence number that ends an answer to a request for earlier batches; its payload is empty."""


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[list[str] | None] | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    """Seconds since 1970."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int = 0


def sequence_frame(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")


class Packer:
    """Puts events of blocks of so many tokens into payloads."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._encoder = msgspec.msgpack.Encoder()

    def payload(self, events: Sequence[BlockEvent], seconds: float) -> bytes:
        """seconds: since 1970."""
        return self._encoder.encode(EventBatch(seconds, [self._on_wire(event) for event in events]))

    def _on_wire(self, event: BlockEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
        match event:
            case BlocksStored():
                ids = np.frombuffer(event.ids, dtype=np.int32).tolist()
                keys = [[event.scope], *([None] * (len(event.hashes) - 1))] if event.scope else None
                return BlockStored(event.hashes, event.parent, ids, self._block_tokens, None, event.tier, None, keys)
            case BlocksRemoved():
                return BlockRemoved(event.hashes, event.tier)
            case AllCleared():
                return AllBlocksCleared()

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
