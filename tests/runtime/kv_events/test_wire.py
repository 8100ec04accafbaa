"""The shapes that docs/kv_events.md promises, read by a reader of its own."""

from __future__ import annotations

import numpy as np
import plain_msgpack

from baton.radix.events.block_events import AllCleared, BlocksRemoved, BlocksStored
from baton.runtime.kv_events.wire import END, Packer, sequence_frame


def ids(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def test_shapes() -> None:
    events = [
        BlocksStored("GPU", [5, 1 << 62], None, ids(1, 2, 3, 70_000)),
        BlocksStored("CPU_PINNED", [7], 1 << 62, ids(8, 9)),
        BlocksStored("GPU", [11, 12], None, ids(1, 2, 3, 4), "00ff"),
        BlocksRemoved("GPU", [1 << 62, 5]),
        AllCleared(),
    ]
    assert plain_msgpack.read(Packer(2).payload(events, 12.5)) == [
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
    assert sequence_frame(258) == b"\0\0\0\0\0\0\1\2" and END == b"\xff" * 8


def test_long_events_become_batches_of_their_own() -> None:
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
