"""Records of finished requests: their memory is counted once, however many share it; and the report of leases."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from baton.scheduler.continuation.records import HeldTokens, SampleRecord, describe_leases
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.token_buffer import TokenBuffer
from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import Harness


def really_held(samples: list[SampleRecord]) -> int:
    """From scratch: the room of each memory once, and the results."""
    memories = {id(sample.ids.memory): len(sample.ids.memory.data) for sample in samples}
    return sum(memories.values()) + sum(len(sample.result) for sample in samples)


@pytest.mark.parametrize("seed", range(5))
def test_held_tokens_match_actual_buffers(seed: int) -> None:
    rng = random.Random(seed)
    held, kept = HeldTokens(), [SampleRecord(("r", 0), TokenBuffer(np.arange(50, dtype=np.int32)), 0)]
    held.add_samples(kept)
    for _ in range(300):
        if kept and rng.random() < 0.45:
            gone = kept.pop(rng.randrange(len(kept)))
            held.remove_samples([gone])
        else:
            ids = rng.choice(kept).ids.share() if kept and rng.random() < 0.8 else TokenBuffer(np.zeros(9, np.int32))
            ids.extend(np.zeros(rng.randrange(40), dtype=np.int32))
            for _ in range(rng.randrange(5)):
                ids.append(1)
            result = np.zeros(rng.choice([0, 0, 7]), dtype=np.int32)
            kept.append(SampleRecord(("r", 0), ids.cut(len(ids) - rng.randrange(3)), 0, result=result))
            held.add_samples(kept[-1:])
        assert held.total == really_held(kept)
    held.remove_samples(kept)
    assert held.total == 0 and not held._holders


def test_long_conversation_evicts_no_other_records() -> None:
    """22 turns that begin with 3,000 tokens: of turns counted one by one, 22 × 3,000 and more would not fit."""
    harness = Harness(num_tokens=8192, context=6000, chunk=4096, max_finished_tokens=20_000)
    harness.add("bystander", prompt_of(100, 1), 3)
    harness.add("turn 0", prompt_of(3000, 2), 5)
    harness.run()
    for turn in range(1, 22):
        harness.continue_from(f"turn {turn - 1}", f"turn {turn}", prompt_of(20, turn), 5)
        harness.run()
    records = harness.scheduler._continuations._records
    assert len(records) == 23 and records.held.total < 20_000
    harness.continue_from("bystander", "later", [1], 2)
    harness.run()


def test_forgotten_record_frees_unshared_tokens() -> None:
    harness = Harness(num_tokens=8192, context=4000, chunk=4096, max_finished_requests=3)
    records = harness.scheduler._continuations._records
    harness.add("a", prompt_of(1000, 2), 5)
    harness.run()
    alone = records.held.total
    assert 1005 <= alone <= 1400
    harness.continue_from("a", "b", prompt_of(10, 3), 5)
    harness.run()
    assert records.held.total == alone, "b goes on in a's memory"
    for number in range(2):
        harness.add(f"c{number}", prompt_of(10, number), 2)
        harness.run()
    with pytest.raises(RequestRefused):  # it is forgotten
        harness.continue_from("a", "d", [1], 2)
    assert records.held.total >= alone, "b still holds the memory that a began"
    harness.add("c2", prompt_of(10, 9), 2)
    harness.run()
    assert records.held.total < 400


def test_flooding_client_evicts_only_its_own_records() -> None:
    harness = Harness(num_tokens=8192, context=4000, chunk=4096, max_finished_requests=6)
    records = harness.scheduler._continuations._records
    for number in range(3):
        harness.add(f"alice/{number}", prompt_of(10, number), 2, client="alice")
        harness.run()
    for number in range(30):
        harness.add(f"bob/{number}", prompt_of(10, number), 2, client="bob")
        if number % 3 == 0:
            harness.abort(f"bob/{number}")  # what failed is on record too
        harness.run()
        assert len(records) <= 6
    assert all(records.get_record(f"alice/{number}") for number in range(3))
    assert [number for number in range(30) if records.get_record(f"bob/{number}")] == [27, 28, 29]
    for number in range(3, 9):
        harness.add(f"alice/{number}", prompt_of(10, number), 2, client="alice")
        harness.run()
    assert [number for number in range(9) if records.get_record(f"alice/{number}")] == [6, 7, 8]
    assert records.get_record("bob/27"), "hers go for hers, now that each has half"


def test_single_client_may_use_all_records() -> None:
    harness = Harness(num_tokens=8192, context=4000, chunk=4096, max_finished_requests=6)
    for number in range(6):
        harness.add(f"{number}", prompt_of(10, number), 2, client="alice")
        harness.run()
    assert all(harness.scheduler._continuations._records.get_record(f"{number}") for number in range(6))


def test_long_prompts_evict_no_records_of_other_clients() -> None:
    harness = Harness(num_tokens=8192, context=4000, chunk=4096, max_finished_tokens=8000)
    records = harness.scheduler._continuations._records
    harness.add("alice", prompt_of(50, 0), 2, client="alice")
    harness.run()
    for number in range(12):
        harness.add(f"bob/{number}", prompt_of(2000, number + 1), 2, client="bob")
        harness.run()
        assert records.held.total <= 8000
    assert records.get_record("alice") and records.get_record("bob/11") and not records.get_record("bob/0")


def leases_of(harness: Harness, after: int = -1, limit: int = 100, client: str | None = None) -> dict[str, Any]:
    scheduler = harness.scheduler
    return describe_leases(scheduler._leases, scheduler.named_leases(), harness.now, after, limit, client)


class TestDescribeLeases:
    def test_lease_report_has_owner_and_expiry(self) -> None:
        harness = Harness()
        harness.add("parent", prompt_of(30), 8, retain_ttl=50.0, client="alice")
        harness.run()
        ended = harness.now
        harness.now += 10.0
        (lease,) = leases_of(harness)["leases"]
        assert {name: lease[name] for name in ("rid", "index", "job_id", "user", "is_claimed")} == {
            "rid": "parent",
            "index": 0,
            "job_id": None,
            "user": "alice",
            "is_claimed": False,
        }
        assert lease["tokens"] == lease["own_tokens"] == 37 and leases_of(harness)["leased_tokens"] == 37
        assert 10.0 <= lease["idle_s"] <= 10.0 + ended and lease["idle_s"] + lease["expires_in_s"] == 50.0
        harness.now += 100.0
        harness.step()
        assert leases_of(harness) == {"leases": [], "next": None, "live": 0, "leased_tokens": 0}

    def test_lease_report_can_be_limited_to_one_client(self) -> None:
        harness = Harness()
        for number, client in enumerate(("alice", "bob", "alice", "alice/")):
            harness.add(f"r{number}", prompt_of(20 + number, number), 4, retain_ttl=50.0, client=client)
        harness.run()
        hers = leases_of(harness, limit=1, client="alice")
        assert [lease["rid"] for lease in hers["leases"]] == ["r0"] and hers["live"] == 2
        assert hers["leased_tokens"] == 23 + 25 and leases_of(harness)["leased_tokens"] == 23 + 24 + 25 + 26
        rest = leases_of(harness, after=hers["next"], client="alice")
        assert [lease["rid"] for lease in rest["leases"]] == ["r2"] and rest["next"] is None
        nothing = {"leases": [], "next": None, "live": 0, "leased_tokens": 0}
        assert leases_of(harness, client="carol") == leases_of(harness, client="") == nothing

    def test_claimed_lease_is_reported_without_expiry(self) -> None:
        harness = Harness(num_tokens=128, rows=2)
        harness.add("parent", prompt_of(30), 4, retain_ttl=50.0)
        harness.run()
        for number in range(2):  # all rows are taken
            harness.add(f"busy{number}", prompt_of(20, number), 20)
        harness.step()
        harness.continue_from("parent", "child", [5], 4)
        (lease,) = leases_of(harness)["leases"]
        assert lease["is_claimed"] and lease["expires_in_s"] is None and lease["rid"] == "parent"
        harness.run()

    def test_lease_report_pages_follow_grant_order(self) -> None:
        harness = Harness(leases=8, leased_ratio=1.0)
        for number in range(5):
            harness.add(f"r{number}", prompt_of(10, number), 2, retain_ttl=100.0)
            harness.run()
        first = leases_of(harness, limit=2)
        second = leases_of(harness, first["next"], limit=2)
        assert harness.scheduler.release_leases("r2")
        third = leases_of(harness, second["next"], limit=2)
        named = [[lease["rid"] for lease in page["leases"]] for page in (first, second, third)]
        assert named == [["r0", "r1"], ["r2", "r3"], ["r4"]]
        assert (first["live"], third["live"], third["next"]) == (5, 4, None)
        assert leases_of(harness, limit=4)["next"] is None, "a page that is just full is the last one"

    def test_pin_report_names_its_job(self) -> None:
        harness = Harness(policy="continuum", context=512)
        harness.add("step", prompt_of(20), 4, job_id="job", retain_ttl=30.0)
        harness.run()
        (lease,) = leases_of(harness)["leases"]
        assert (lease["job_id"], lease["rid"]) == ("job", "step")
