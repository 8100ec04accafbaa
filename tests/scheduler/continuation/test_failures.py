"""Continuations that cannot simply go on, on the KV-echo model: refused, aborted, retracted, in a step that failed."""

from __future__ import annotations

import pytest

from baton.entrypoints.http_statuses import status_of
from baton.scheduler.outcome import RequestRefused
from tests.doubles.continuation_scene import DEPTHS, inheritance, parent_ids
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness


def test_unknown_parent_and_foreign_namespace_get_the_same_404() -> None:
    harness = Harness()
    harness.add("parent", prompt_of(20), 3, namespace="mine")
    for _ in range(2):  # while it runs, and after its end
        messages = []
        for parent, namespace in (("parent", "theirs"), ("nobody", "mine")):
            with pytest.raises(RequestRefused) as refusal:
                harness.continue_from(parent, "child", [1], 2, namespace=namespace)
            assert status_of(refusal.value) == 404
            messages.append(str(refusal.value).replace(parent, "X"))
        assert messages[0] == messages[1]
        harness.run()
    harness.continue_from("parent", "child", [1], 2, namespace="mine")
    harness.run()


@PAGES
def test_fallback_prompt_replaces_unknown_parent(page_size: int) -> None:
    harness = Harness(page_size=page_size)
    harness.add("parent", prompt_of(20), 3, namespace="mine")
    whole = prompt_of(30, 7)
    for state in ("running", "ended"):
        for parent, namespace in (("parent", "theirs"), ("nobody", "mine")):
            child = f"of {parent}, {state}"
            harness.continue_from(parent, child, [1], 2, namespace=namespace, fallback=whole)
        harness.run()
    for rid in ("of parent, running", "of nobody, running", "of parent, ended", "of nobody, ended"):
        got = inheritance(harness, rid)
        assert (got.path, got.inherited_tokens) == ("fallback", 0), rid
        assert harness.outcomes[rid, 0].tokens == expected_output(whole, 2)
    harness.continue_from("parent", "its own", [1], 2, namespace="mine", fallback=whole)
    harness.run()
    assert inheritance(harness, "its own").inherited_tokens == 23  # its parent's, though page 64 keeps no KV of so few


def test_aborted_parent_is_409_for_waiting_and_later_children() -> None:
    harness = Harness()
    harness.add("parent", prompt_of(20), 30)
    harness.step()
    harness.continue_from("parent", "waiting", [1], 2)
    harness.continue_from("waiting", "grandchild", [1], 2)
    harness.abort("parent")
    for rid in ("waiting", "grandchild"):
        outcome = harness.outcomes[rid, 0]
        assert outcome.refusal is not None and status_of(outcome.refusal) == 409
    with pytest.raises(RequestRefused) as refusal:
        harness.continue_from("parent", "late", [1], 2)
    assert status_of(refusal.value) == 409
    assert harness.scheduler.is_idle


def test_refusal_names_parent_and_its_failure() -> None:
    harness = Harness()
    harness.add("parent", prompt_of(20), 30)
    harness.step()
    harness.continue_from("parent", "waiting", [1], 2)
    with pytest.raises(RequestRefused, match=r"^continuation_of 'waiting': that request waits for its own parent"):
        harness.continue_from("waiting", "grandchild", [1], 2, at="now")
    harness.fault = lambda batch: "finish"
    harness.step()
    refusal = harness.outcomes["waiting", 0].refusal
    assert refusal is not None and refusal.message.startswith("continuation_of 'parent': that request did not finish")
    assert "failed before finish" in refusal.message


def test_forgotten_parent_is_410_or_fallback() -> None:
    harness = Harness(max_finished_requests=2)
    for i in range(4):
        harness.add(f"r{i}", prompt_of(20, i), 3)
        harness.run()
    with pytest.raises(RequestRefused) as refusal:
        harness.continue_from("r0", "child", [1], 2)
    assert status_of(refusal.value) == 410
    own = prompt_of(25, 9)
    harness.continue_from("r0", "child", [1], 4, fallback=own)
    harness.run()
    assert inheritance(harness, "child").path == "fallback"
    assert harness.outcomes["child", 0].tokens == expected_output(own, 4)


def test_suffix_over_the_context_is_refused_at_once_or_when_the_parent_ends() -> None:
    harness = Harness(context=64)
    harness.add("parent", prompt_of(30), 10)
    harness.step()
    harness.continue_from("parent", "waiting", prompt_of(30), 2)
    harness.run()
    outcome = harness.outcomes["waiting", 0]
    assert outcome.refusal is not None and status_of(outcome.refusal) == 400
    with pytest.raises(RequestRefused, match="context"):
        harness.continue_from("parent", "late", prompt_of(30), 2)


def test_running_duplicate_rid_is_409_and_a_recorded_one_is_replaced() -> None:
    harness = Harness()
    harness.add("a", prompt_of(20), 3, retain_ttl=50.0)
    harness.run()
    harness.add("a", prompt_of(20, 1), 3)
    assert len(harness.scheduler._leases) == 0
    with pytest.raises(RequestRefused) as refusal:
        harness.continue_from("a", "a", [1], 2)
    assert status_of(refusal.value) == 409
    harness.run()
    harness.continue_from("a", "b", [1], 2)
    harness.run()
    full = parent_ids(harness, "a", prompt_of(20, 1))
    assert harness.outcomes["b", 0].tokens == expected_output([*full, 1], 2)


def test_abort_of_root_ends_long_chain_of_parked_children() -> None:
    harness = Harness(check=False)
    harness.add("s0", prompt_of(20), 30)
    harness.step()
    for stage in range(1, 1500):
        harness.continue_from(f"s{stage - 1}", f"s{stage}", [1], 2)
    harness.abort("s0")
    assert harness.scheduler.is_idle
    last = harness.outcomes["s1499", 0]
    assert last.refusal is not None and status_of(last.refusal) == 409
    assert len(last.refusal.message) < 200


@DEPTHS
@PAGES
@pytest.mark.parametrize("steps", range(10))
@pytest.mark.parametrize("victim", ["parent", "child"])
def test_abort_of_parent_or_child_at_any_step_leaks_nothing(
    page_size: int, depth: int, steps: int, victim: str
) -> None:
    harness = Harness(page_size=page_size, depth=depth, chunk=25)
    prompt = prompt_of(60)
    harness.add("parent", prompt, 4, retain_ttl=3.0)
    harness.continue_from("parent", "child", prompt_of(30, 1), 4)
    for _ in range(steps):
        harness.step()
    harness.abort(victim)
    harness.run()
    harness.now += 10
    harness.step()
    assert len(harness.scheduler._leases) == 0
    stats = harness.scheduler.stats()
    assert stats.free_tokens + stats.evictable_tokens == stats.total_tokens
    assert all(outcome.finish is not None for outcome in harness.outcomes.values())


@DEPTHS
@PAGES
def test_retraction_of_parents_and_children_changes_no_output(page_size: int, depth: int) -> None:
    harness = Harness(num_tokens=512, page_size=page_size, depth=depth, context=300)
    prompts = [prompt_of(40, i) for i in range(8)]
    for i, prompt in enumerate(prompts):
        harness.add(f"p{i}", prompt, 60)
        harness.continue_from(f"p{i}", f"c{i}", prompt_of(3, i), 50)
    harness.run()
    assert harness.scheduler.stats().retractions > 0
    for i, prompt in enumerate(prompts):
        full = parent_ids(harness, f"p{i}", prompt) + prompt_of(3, i)
        assert harness.outcomes[f"c{i}", 0].tokens == expected_output(full, 50)


def test_failed_step_spares_other_continuations() -> None:
    harness = Harness(page_size=16)
    prompt = prompt_of(40)
    harness.add("good", prompt, 12)
    harness.step()
    harness.continue_from("good", "fork", [1], 5, at="now")
    harness.add("bad", prompt_of(30, 1), 5)
    batch = harness.scheduler.next_batch(harness.now)
    assert batch is not None
    serials = batch.serials.tolist()
    failed = {request.rid for request in harness.scheduler.live_requests if request.serial in serials}
    harness._take(harness.scheduler.fail_step(harness.now, "out of memory"))
    harness.verify()
    harness.run()
    assert failed and all(harness.outcomes[rid, 0].finish is not None for rid in failed)
    for rid in {"good", "fork"} - failed:
        assert harness.outcomes[rid, 0].finish is not None
    if "good" not in failed:
        assert harness.outcomes["good", 0].tokens == expected_output(prompt, 12)
