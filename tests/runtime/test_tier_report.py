"""What GET /cache/tiers says, from the stats of a scheduler."""

from __future__ import annotations

import msgspec

from baton.runtime.control import report_tiers
from baton.scheduler.outcome import FoundTokens
from baton.scheduler.stats import CopyStats, TierStats
from tests.doubles.scheduler_harness import Harness

SETTINGS = {"host_write_policy": "write_back", "host_copied_by": "torch"}


def test_tier_report_without_tiers() -> None:
    report = report_tiers(Harness(num_tokens=512).scheduler.stats(), SETTINGS)
    assert (report["host"], report["disk"], report["remote"]) == (None, None, None)
    assert report["device"]["total_tokens"] == report["device"]["free_tokens"] == 512
    assert report["device"]["prefill_tokens_per_s"] is None


def test_tier_report_with_tiers() -> None:
    stats = msgspec.structs.replace(
        Harness(num_tokens=512).scheduler.stats(),
        bytes_per_token=2**20,
        hits_by_tier=FoundTokens(1, 2, 3),
        prefill_tokens_per_s=5.0,
        tiers=(
            TierStats("host", 1024, 256, stores=CopyStats(512, 0.5), loads=CopyStats(tokens_per_s=7.0)),
            TierStats("disk", 4096, 1024, 3072, total_bytes=5 * 2**30, used_bytes=2**30),
            TierStats("remote", None, None, None),
        ),
    )
    report = report_tiers(stats, SETTINGS)
    assert (report["bytes_per_token"], report["device"]["total_gib"], report["device"]["hit_tokens"]) == (2**20, 0.5, 1)
    assert report["device"]["prefill_tokens_per_s"] == 5.0
    host, disk = report["host"], report["disk"]
    assert (host["total_gib"], host["used_gib"], host["hit_tokens"]) == (1.0, 0.25, 2)
    assert host["stores"] == {"tokens": 512, "seconds": 0.5, "failed_tokens": 0, "tokens_per_s": None, "gib": 0.5}
    assert host["loads"]["tokens_per_s"] == 7.0
    assert (host["write_policy"], host["copied_by"]) == ("write_back", "torch")
    assert (disk["total_tokens"], disk["used_tokens"], disk["free_tokens"]) == (4096, 1024, 3072)
    assert (disk["total_gib"], disk["used_gib"]) == (5.0, 1.0), "what it takes of the disk, headers and all"
    remote = report["remote"]
    sizes = ("total_tokens", "used_tokens", "free_tokens", "total_gib", "used_gib")
    assert [remote[name] for name in sizes] == [None] * 5
    assert not {"total_bytes", "used_bytes"} & disk.keys()
    assert disk["hit_tokens"] == 3 and "write_policy" not in disk
