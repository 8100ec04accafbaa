"""What an operator hears of the leases."""

from __future__ import annotations

from typing import Any

from baton.scheduler.continuation.report import describe_leases
from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import Harness


def leases_of(harness: Harness, after: int = -1, limit: int = 100, client: str | None = None) -> dict[str, Any]:
    scheduler = harness.scheduler
    return describe_leases(scheduler._leases, scheduler.named_leases(), harness.now, after, limit, client)


def test_a_lease_says_whose_it_is_and_until_when() -> None:
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


def test_a_client_is_told_of_its_own_leases() -> None:
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


def test_one_that_a_child_waits_for_does_not_expire() -> None:
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


def test_pages_follow_the_order_of_grants() -> None:
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


def test_a_pin_names_its_job() -> None:
    harness = Harness(policy="continuum", context=512)
    harness.add("step", prompt_of(20), 4, job_id="job", retain_ttl=30.0)
    harness.run()
    (lease,) = leases_of(harness)["leases"]
    assert (lease["job_id"], lease["rid"]) == ("job", "step")
