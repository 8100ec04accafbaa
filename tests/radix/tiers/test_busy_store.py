"""A store that refuses, hangs or is behind costs nobody more than its own blocks."""

from __future__ import annotations

from host_rig import DiskRig, tokens


def test_a_store_that_refuses_every_block_is_asked_once_for_each() -> None:
    rig = DiskRig(16)
    rig.insert(tokens(16 * 20))  # more blocks than may be under way at a time
    rig.store_all()
    asked: list[bytes] = []
    rig.pump_disk()
    while rig.orders:
        assert len(asked) < 100, "it is asked again and again"
        for fence in list(rig.orders):
            asked.append(rig.disk.writing[fence].key)
            rig.end_disk(fence, most=0)
        rig.pump_disk()
    assert len(asked) == len(set(asked)) == 20
    rig.insert(tokens(16 * 21))  # what goes on from there is a reason to try again
    rig.to_disk()
    assert len(rig.blocks.blocks) == 21
