"""Requests that name no job: those whose ids extend a finished turn continue its job and its KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton.scheduler.jobs.calls import ToolCall
from baton.scheduler.jobs.kept_turn import KeptTurn, Worth
from baton.scheduler.policies.registry import PINNING
from baton.scheduler.request import Request
from baton.scheduler.request_spec import ContinuationSpec, Predecessor
from baton.scheduler.token_buffer import pack_ids
from tests.doubles.kv_echo import expected_output
from tests.doubles.scheduler_harness import PAGES, Harness

LS = (ToolCall("ls", "ls -l"),)
PROMPT = list(range(1, 70))


def harness(**more: Any) -> Harness:
    scene = Harness(**{"policy": "handoff", "num_tokens": 1024, **more})
    scene.turn_s = 0.01
    return scene


def plain(scene: Harness, rid: str, prompt: list[int], new: int = 4, **more: Any) -> list[int]:
    """A request that names no job, to its end. Returns prompt and output."""
    scene.add(rid, prompt, new, **more)
    scene.run()
    tokens = scene.outcomes[rid, 0].tokens
    assert tokens == expected_output(prompt, new, frozenset(scene.eos))
    return prompt + tokens


def request_of(scene: Harness, rid: str, index: int = 0) -> Request:
    request = scene.outcomes[rid, index].request
    assert request is not None
    return request


def job_of(scene: Harness, rid: str, index: int = 0) -> str | None:
    job = request_of(scene, rid, index).job
    return job.id if job is not None else None


def path(scene: Harness, rid: str) -> str | None:
    inheritance = request_of(scene, rid).inheritance
    return inheritance.path if inheritance is not None else None


@PAGES
@pytest.mark.parametrize("policy", PINNING)
def test_request_extending_finished_turn_continues_its_job(policy: str, page_size: int) -> None:
    scene = harness(policy=policy, page_size=page_size)
    said = plain(scene, "a", PROMPT)
    scene.scheduler.record_tool_calls("a", 0, LS, scene.now)
    scene.now += 0.5
    said = plain(scene, "b", [*said, 7, 7, 7])
    inheritance = request_of(scene, "b").inheritance
    assert inheritance is not None and (inheritance.path, inheritance.recomputed_tokens) == ("handoff", 1)
    assert job_of(scene, "a") == job_of(scene, "b") is not None
    assert scene.scheduler._pins.times.history.durations_of("ls").tolist() == [pytest.approx(0.5, abs=0.1)]
    plain(scene, "c", [*said, 8])
    assert path(scene, "c") == "handoff" and job_of(scene, "c") == job_of(scene, "a")
    (job,) = scene.scheduler.describe_jobs(None, None, scene.now)
    assert job["turns"] == 3


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_lease_is_handed_over_where_nothing_is_pinned(policy: str) -> None:
    """A policy without pins opens no jobs. A lease that the client asked for still passes to the request that extends
    it."""
    scene = harness(policy=policy)
    said = plain(scene, "a", PROMPT, retain_ttl=60.0)
    said = plain(scene, "b", [*said, 7], retain_ttl=60.0)
    assert path(scene, "b") == "handoff" and job_of(scene, "b") is None
    plain(scene, "c", [*said, 8])
    assert path(scene, "c") == "handoff" and len(scene.scheduler._leases) == 0
    plain(scene, "one", PROMPT)
    assert len(scene.scheduler._pins._turns) == 2, "a turn of no job and without a lease leaves no record"


def test_turn_of_named_job_and_of_chat_can_be_extended() -> None:
    scene = harness()
    cases: dict[str, dict[str, Any]] = {"job": {"job_id": "mine"}, "chat": {"job_id": "chat-chat", "unasked": True}}
    for name, fields in cases.items():
        said = plain(scene, name, [ord(name[0]), *PROMPT], **fields)
        plain(scene, f"{name} next", [*said, 1])
        assert job_of(scene, f"{name} next") == fields["job_id"] and path(scene, f"{name} next") == "handoff"


def test_another_client_or_namespace_is_never_found() -> None:
    scene = harness()
    said = plain(scene, "a", PROMPT, client="alice", namespace="salt")
    others: dict[str, dict[str, Any]] = {
        "bob": {"client": "bob", "namespace": "salt"},
        "unsalted": {"client": "alice"},
        "nobody": {"namespace": "salt"},
    }
    for rid, fields in others.items():
        plain(scene, rid, [*said, 1], **fields)
        assert path(scene, rid) is None and job_of(scene, rid) != job_of(scene, "a")
    plain(scene, "b", [*said, 1], client="alice", namespace="salt")
    assert path(scene, "b") == "handoff" and job_of(scene, "b") == job_of(scene, "a")


def test_stop_token_may_be_sent_back_or_dropped() -> None:
    output = expected_output(PROMPT, 40, frozenset())
    eos = output[12]
    assert eos not in output[:12]
    for sent_back in (True, False):
        scene = harness(eos=(eos,))
        said = plain(scene, "a", PROMPT, 40)
        assert said[-1] == eos
        plain(scene, "b", [*(said if sent_back else said[:-1]), 1, 2])
        assert path(scene, "b") == "handoff" and job_of(scene, "b") == job_of(scene, "a"), sent_back


def test_last_token_of_answer_may_have_merged_with_what_follows() -> None:
    scene = harness()
    said = plain(scene, "a", PROMPT, 8)
    said[-1] += 1
    plain(scene, "b", [*said, 1, 2])
    inheritance = request_of(scene, "b").inheritance
    assert inheritance is not None and inheritance.path == "handoff"
    assert inheritance.inherited_tokens == len(PROMPT) + 7 and job_of(scene, "b") == job_of(scene, "a")


@PAGES
def test_long_prompts_computed_in_chunks_are_found(page_size: int) -> None:
    scene = harness(page_size=page_size, num_tokens=4096, context=2048, chunk=64, leased_ratio=0.9)
    said = plain(scene, "a", list(range(1, 1000)))
    plain(scene, "b", [*said, *range(5000, 5300)])
    request = request_of(scene, "b")
    assert path(scene, "b") == "handoff" and request.found.total == len(said) - 1


def test_samples_of_one_prompt_are_told_apart() -> None:
    """Several samples begin no job: their client takes the best. Where a lease was asked for, each is on record."""
    scene = harness()
    scene.add("a", PROMPT, 6, n=3, retain_ttl=60.0)
    scene.run()
    assert all(job_of(scene, "a", index) is None for index in range(3))
    said = PROMPT + scene.outcomes["a", 1].tokens
    scene.add("b", [*said, 5], 4, n=2)
    scene.run()
    assert path(scene, "b") == "handoff" and request_of(scene, "b", 1).inheritance is not None
    assert job_of(scene, "b") is None


def test_result_of_beam_search_can_be_extended() -> None:
    scene = harness()
    scene.add("a", PROMPT, 7, beam_width=3, n=3, retain_ttl=60.0)
    scene.run()
    said = PROMPT + scene.outcomes["a", 0].results[2].ids.tolist()
    plain(scene, "b", [*said, 5])
    assert path(scene, "b") == "handoff" and job_of(scene, "a") is None


def test_requests_that_no_other_follows_begin_no_job() -> None:
    scene = harness()
    scene.add("scored", PROMPT, 0)
    scene.add("unwanted", [3, *PROMPT], 4, no_reuse_from=0)
    scene.add("search", [4, *PROMPT], 4, beam_width=2)
    scene.run()
    assert [job_of(scene, rid) for rid in ("scored", "unwanted", "search")] == [None] * 3
    assert len(scene.scheduler._leases) == 0 and len(scene.scheduler._pins._turns) == 0


def test_running_and_aborted_turns_are_not_extended() -> None:
    scene = harness()
    scene.add("a", PROMPT, 40)
    for _ in range(10):
        scene.step()
    so_far = PROMPT + scene.outcomes["a", 0].tokens
    scene.add("b", [*so_far, 1], 4)
    scene.abort("a")
    scene.run()
    plain(scene, "c", [*so_far, 2])
    assert path(scene, "b") is None and path(scene, "c") is None
    assert len({job_of(scene, rid) for rid in "abc"}) == 3


def test_two_requests_extend_one_turn() -> None:
    scene = harness()
    said = plain(scene, "a", PROMPT)
    for number in range(3):
        scene.add(f"b{number}", [*said, number], 4)
    scene.run()
    assert {job_of(scene, f"b{number}") for number in range(3)} == {job_of(scene, "a")}
    assert [path(scene, f"b{number}") for number in range(3)] == ["handoff", "match", "match"]
    for number in range(3):
        plain(scene, f"c{number}", [*said, number, *scene.outcomes[f"b{number}", 0].tokens, 9])
        assert path(scene, f"c{number}") == "handoff" and job_of(scene, f"c{number}") == job_of(scene, "a")


def test_conversations_with_same_first_turn_become_two_jobs() -> None:
    scene = harness()
    for rid in ("a", "b"):
        said = plain(scene, rid, PROMPT)
    for number, rid in enumerate(("c", "d")):
        plain(scene, rid, [*said, number])
    assert (job_of(scene, "c"), job_of(scene, "d")) == (job_of(scene, "b"), job_of(scene, "a"))


def test_reused_rid_names_another_job() -> None:
    scene = harness()
    said = plain(scene, "a", PROMPT)
    first = job_of(scene, "a")
    plain(scene, "a", [9, *PROMPT])
    assert job_of(scene, "a") != first
    plain(scene, "b", [*said, 1])
    assert job_of(scene, "b") == first and path(scene, "b") is None, "its ids are no longer on record"


def test_job_that_ended_is_not_continued() -> None:
    scene = harness()
    said = plain(scene, "a", PROMPT)
    job = job_of(scene, "a")
    assert job is not None
    scene.scheduler.end_job("", job, scene.now)
    plain(scene, "b", [*said, 1])
    assert job_of(scene, "b") != job and path(scene, "b") == "match"
    said = plain(scene, "c", [5, *PROMPT], job_id="mine")
    said = plain(scene, "last", [*said, 1], job_id="mine", is_last_step=True)
    plain(scene, "d", [*said, 2])
    assert job_of(scene, "d") != "mine" and path(scene, "d") == "match"


def test_flushed_cache_keeps_jobs() -> None:
    scene = harness()
    said = plain(scene, "a", PROMPT)
    assert scene.scheduler.flush_cache()
    plain(scene, "b", [*said, 1])
    assert path(scene, "b") == "fallback" and job_of(scene, "b") == job_of(scene, "a")


def test_retracted_requests_are_found() -> None:
    scene = harness(num_tokens=190)
    said = plain(scene, "a", PROMPT[:60])
    scene.add("b", [*said, 7, 8], 40)
    scene.add("other", [99, *PROMPT[:60]], 40)
    scene.run()
    assert sum(request_of(scene, rid).retractions for rid in ("b", "other")) > 0
    for rid in ("b", "other"):
        prompt = request_of(scene, rid).token_ids.view().tolist()
        plain(scene, f"{rid} next", [*prompt, 3])
        assert job_of(scene, f"{rid} next") == job_of(scene, rid) is not None


def test_continuation_belongs_to_job_of_its_parent() -> None:
    scene = harness()
    said = plain(scene, "a", PROMPT, retain_ttl=60.0)
    scene.continue_from("a", "b", [5, 6])
    scene.run()
    assert job_of(scene, "b") == job_of(scene, "a") and path(scene, "b") == "handoff"
    scene.add("running", [3, *PROMPT], 20)
    for _ in range(4):
        scene.step()
    scene.continue_from("running", "fork", [5], at="now")
    scene.continue_from("running", "waits", [6])
    scene.run()
    assert {job_of(scene, rid) for rid in ("running", "fork", "waits")} == {job_of(scene, "running")}
    scene.scheduler.forget_record("a")
    spec = ContinuationSpec("forgotten", fallback_ids=pack_ids([*said, 9]))
    scene.add("late", [9], 4, continuation=spec)
    scene.run()
    assert job_of(scene, "late") == job_of(scene, "a")


def test_named_predecessor_is_not_looked_up() -> None:
    scene = harness()
    said = plain(scene, "a", PROMPT)
    plain(scene, "b", [*said, 1], predecessor=Predecessor("elsewhere"))
    assert path(scene, "b") is None and job_of(scene, "b") != job_of(scene, "a")


def test_unnamed_first_turn_is_worth_little_until_its_calls_are_known() -> None:
    scene = harness()
    plain(scene, "a", PROMPT)
    plain(scene, "asked", [3, *PROMPT], retain_ttl=60.0)
    worth = {rid: lease.owner.worth for lease, (rid, _) in scene.scheduler.named_leases().items()
             if isinstance(lease.owner, KeptTurn)}  # fmt: skip
    assert worth == {"a": Worth.FIRST_TURN, "asked": Worth.ASKED_FOR}


def test_nothing_is_recognized_where_that_is_switched_off() -> None:
    scene = harness(max_recognized_turns=0)
    said = plain(scene, "a", PROMPT)
    plain(scene, "b", [*said, 1])
    assert job_of(scene, "a") is None and job_of(scene, "b") is None and len(scene.scheduler._leases) == 0


def test_flood_of_one_shots_between_turns_leaves_conversation_its_kv() -> None:
    """Twelve pools of others' requests: all but the job's KV is evicted many times."""
    scene = harness(num_tokens=600, context=300, max_client_leased_ratio=1.0)
    said = plain(scene, "a", PROMPT)
    scene.scheduler.record_tool_calls("a", 0, LS, scene.now)
    said = plain(scene, "b", [*said, 1])
    scene.scheduler.record_tool_calls("b", 0, LS, scene.now)
    scene.turn_s = 0.0
    for number in range(60):
        start = 1000 * (number + 1)
        scene.add(f"one{number}", list(range(start, start + 120)), 4)
        if number % 3 == 2:
            scene.run()
            for each in range(number - 2, number + 1):
                scene.scheduler.record_tool_calls(f"one{each}", 0, (), scene.now)
    left = scene.cache.match_len("", np.array(said, dtype=np.int32))
    plain(scene, "c", [*said, 2])
    assert path(scene, "c") == "handoff" and left >= len(said) - 1


def test_table_of_turns_is_bounded() -> None:
    scene = harness(max_recognized_turns=5)
    for number in range(20):
        plain(scene, f"a{number}", [number, *PROMPT])
    assert len(scene.scheduler._pins._turns) == 5
