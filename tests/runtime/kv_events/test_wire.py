"""The shapes that docs/kv_events.md promises, read by a reader of its own."""

from __future__ import annotations

import msgspec
import numpy as np

from baton.radix.block_events import AllCleared, BlocksRemoved, BlocksStored
from baton.runtime.kv_events.wire import END, Packer, sequence_frame
from tests.doubles import plain_msgpack
from tests.doubles.published_events import (
    SGLangAllBlocksCleared,
    SGLangBatch,
    SGLangBlockRemoved,
    SGLangBlockStored,
    VLLMBatch,
    VLLMBlockStored,
)


def ids(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


EVENTS = [
    BlocksStored("GPU", [5, 1 << 62], None, ids(1, 2, 3, 70_000)),
    BlocksStored("CPU_PINNED", [7], 1 << 62, ids(8, 9)),
    BlocksStored("GPU", [11, 12], None, ids(1, 2, 3, 4), "00ff"),
    BlocksRemoved("GPU", [1 << 62, 5]),
    AllCleared(),
]


def stored(hashes: list[int], parent: int | None, tokens: list[int], tier: str, **more: object) -> dict[str, object]:
    known = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": 2}
    return {"type": "BlockStored"} | known | {"lora_id": None, "medium": tier, "lora_name": None} | more


def test_events_encoded_as_maps() -> None:
    assert plain_msgpack.read(Packer(2).payload(EVENTS, 12.5)) == [
        12.5,
        [
            stored([5, 1 << 62], None, [1, 2, 3, 70_000], "GPU"),
            stored([7], 1 << 62, [8, 9], "CPU"),
            stored([11, 12], None, [1, 2, 3, 4], "GPU", extra_keys=[["00ff"], None]),
            {"type": "BlockRemoved", "block_hashes": [1 << 62, 5], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]
    assert sequence_frame(258) == b"\0\0\0\0\0\0\1\2" and END == b"\xff" * 8


def test_events_encoded_as_arrays() -> None:
    assert plain_msgpack.read(Packer(2, "arrays").payload(EVENTS, 12.5)) == [
        12.5,
        [
            ["BlockStored", [5, 1 << 62], None, [1, 2, 3, 70_000], 2, None, "GPU", None, None],
            ["BlockStored", [7], 1 << 62, [8, 9], 2, None, "CPU_PINNED", None, None],
            ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU", None, [["00ff"], None]],
            ["BlockRemoved", [1 << 62, 5], "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]


def test_maps_equal_those_of_vllm() -> None:
    """Read by its structs, which refuse fields they do not know, and written by them again."""
    payload = Packer(2).payload(EVENTS, 12.5)
    batch = msgspec.msgpack.decode(payload, type=VLLMBatch)
    assert batch.events[2] == VLLMBlockStored([11, 12], None, [1, 2, 3, 4], 2, None, "GPU", None, [("00ff",), None])
    assert batch.data_parallel_rank == 0 and len(batch.events) == len(EVENTS)
    assert plain_msgpack.read(msgspec.msgpack.encode(batch)) == plain_msgpack.read(payload)


def test_event_maps_match_sglang_structs() -> None:
    batch = msgspec.msgpack.decode(Packer(2).payload(EVENTS, 12.5), type=SGLangBatch)
    assert batch.events == [
        SGLangBlockStored([5, 1 << 62], None, [1, 2, 3, 70_000], 2, None, "GPU"),
        SGLangBlockStored([7], 1 << 62, [8, 9], 2, None, "CPU"),
        SGLangBlockStored([11, 12], None, [1, 2, 3, 4], 2, None, "GPU"),
        SGLangBlockRemoved([1 << 62, 5], "GPU"),
        SGLangAllBlocksCleared(),
    ]


def test_long_events_are_split_into_batches() -> None:
    packer = Packer(1)
    stored = BlocksStored("GPU", [10, 11, 12, 13, 14], None, ids(1, 2, 3, 4, 5), "aa")
    events = [BlocksRemoved("GPU", [1]), stored, AllCleared(), BlocksRemoved("GPU", [2, 3, 4])]
    batches = list(packer.in_batches(events, 2))
    assert batches == [
        [BlocksRemoved("GPU", [1])],
        [BlocksStored("GPU", [10, 11], None, ids(1, 2), "aa")],
        [BlocksStored("GPU", [12, 13], 11, ids(3, 4))],
        [BlocksStored("GPU", [14], 13, ids(5)), AllCleared()],
        [BlocksRemoved("GPU", [2, 3])],
        [BlocksRemoved("GPU", [4])],
    ]
    assert list(packer.in_batches([], 2)) == []
