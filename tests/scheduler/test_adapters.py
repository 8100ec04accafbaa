"""Requests of different adapters share nothing: no KV, no parent, no turn; they may share a job."""

from __future__ import annotations

import pytest

from baton.scheduler.outcome import RequestRefused
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness

PROMPT = prompt_of(64)


def harness(**more) -> Harness:
    return Harness(**{"num_tokens": 1024, "context": 512, "leases": 8, **more})


def say(scene: Harness, rid: str, prompt: list[int], adapter: str, **more) -> int:
    """Run a request; returns the tokens that it found in the cache."""
    scene.add(rid, prompt, 8, adapter=adapter, **more)
    scene.run()
    outcome = scene.outcomes[rid, 0]
    assert outcome.tokens == expected_output(prompt, 8, adapter=adapter)
    assert outcome.request is not None
    return outcome.request.found.total


@PAGES
def test_prefixes_are_found_by_the_same_adapter_alone(page_size: int) -> None:
    scene = harness(page_size=page_size)
    for adapter in ("", "a", "b"):
        assert say(scene, f"first {adapter}", PROMPT, adapter) == 0
    for adapter in ("", "a", "b"):
        found = say(scene, f"second {adapter}", PROMPT, adapter)
        assert found == 63 - 63 % page_size
        assert say(scene, f"salted {adapter}", PROMPT, adapter, namespace="salt") == 0


def test_adapters_answer_in_one_step() -> None:
    scene = harness()
    for adapter in ("", "a", "b"):
        scene.add(f"r{adapter}", PROMPT, 8, adapter=adapter)
    scene.run()
    for adapter in ("", "a", "b"):
        assert scene.outcomes[f"r{adapter}", 0].tokens == expected_output(PROMPT, 8, adapter=adapter)


@pytest.mark.parametrize("at", ["finish", "now"])
@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize(("parent", "child"), [("a", "b"), ("a", ""), ("", "a")])
def test_continuation_across_adapters_is_refused_or_computed(parent: str, child: str, is_live: bool, at) -> None:
    scene = harness()
    scene.add("p", PROMPT, 40, adapter=parent, retain_ttl=60.0)
    scene.step() if is_live else scene.run()
    with pytest.raises(RequestRefused) as refused:
        scene.continue_from("p", "c", [1, 2], at=at, adapter=child)
    assert refused.value.code == "adapter_mismatch"
    with pytest.raises(RequestRefused) as unknown:  # another tenant learns nothing
        scene.continue_from("p", "c", [1, 2], at=at, adapter=child, namespace="salt")
    assert unknown.value.code == "parent_not_found"
    scene.continue_from("p", "d", [1, 2], at=at, adapter=child, fallback=PROMPT)
    scene.continue_from("p", "e", [1, 2], at="finish", adapter=parent)
    scene.run()
    assert scene.outcomes["d", 0].tokens == expected_output(PROMPT, 8, adapter=child)
    said = scene.outcomes["p", 0].tokens
    assert scene.outcomes["e", 0].tokens == expected_output([*PROMPT, *said, 1, 2], 8, adapter=parent)


def test_job_goes_on_with_another_adapter_and_computes_its_prompt() -> None:
    """Its own turns are found by what they extend, those of another adapter are not."""
    scene = harness(policy="handoff")
    prompt = [*PROMPT]
    for number, (adapter, finds) in enumerate((("a", False), ("a", True), ("b", False), ("a", True))):
        found = say(scene, f"r{number}", prompt, adapter, job_id="job", retain_ttl=60.0)
        assert bool(found) == finds
        prompt = [*prompt, *scene.outcomes[f"r{number}", 0].tokens, 7]
    (job,) = scene.scheduler.describe_jobs("", "job", scene.now)
    assert job["turns"] == 4


def test_unnamed_turn_is_recognized_within_its_adapter() -> None:
    scene = harness(policy="handoff")
    say(scene, "r", PROMPT, "a", retain_ttl=60.0, client="c")
    longer = [*PROMPT, *scene.outcomes["r", 0].tokens, 7]
    say(scene, "other", longer, "b", client="c")
    say(scene, "same", longer, "a", client="c")
    jobs = [scene.outcomes[rid, 0].request for rid in ("r", "other", "same")]
    names = [request.job_id for request in jobs if request is not None]
    assert names[2] == names[0] is not None and names[1] != names[0]
    (first, *_) = [request for request in jobs if request is not None and request.rid == "same"]
    assert first.inheritance is not None and first.inheritance.path == "handoff"


def test_adapters_in_use_are_those_of_live_requests() -> None:
    scene = harness()
    scene.add("r", PROMPT, 8, adapter="a")
    scene.add("s", PROMPT, 8)
    assert scene.scheduler.adapters_in_use == {"a"}
    scene.run()
    assert scene.scheduler.adapters_in_use == set()
