"""A request may name the one whose tokens its prompt begins with: it is continued where they do, and never refused."""

from __future__ import annotations

import pytest

from baton.scheduler.request_spec import Predecessor
from tests.doubles.continuation_scene import DEPTHS, evict_everything, inheritance, parent_ids
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness


def stands_alone(harness: Harness, rid: str) -> bool:
    request = harness.outcomes[rid, 0].request
    assert request is not None
    return request.inheritance is None


@DEPTHS
@PAGES
@pytest.mark.parametrize("suffix_len", [0, 1, 40])
def test_predecessor_with_lease_is_handed_off(page_size: int, depth: int, suffix_len: int) -> None:
    harness = Harness(page_size=page_size, depth=depth, chunk=32)
    prompt = prompt_of(50)
    harness.add("turn", prompt, 7, retain_ttl=100.0)
    harness.run()
    evict_everything(harness)
    before = harness.model.computed_tokens
    whole = parent_ids(harness, "turn", prompt) + prompt_of(suffix_len, 1)
    harness.add("next", whole, 9, predecessor=Predecessor("turn"))
    harness.run()
    assert harness.outcomes["next", 0].tokens == expected_output(whole, 9)
    assert harness.model.computed_tokens - before == suffix_len + 1 + 8
    got = inheritance(harness, "next")
    assert (got.path, got.inherited_tokens, got.recomputed_tokens) == ("handoff", 57, 1)
    assert len(harness.scheduler._leases) == 0


def test_predecessor_without_lease_is_matched() -> None:
    harness = Harness()
    harness.add("turn", prompt_of(50), 7)
    harness.run()
    whole = [*parent_ids(harness, "turn", prompt_of(50)), 1, 2]
    harness.add("next", whole, 9, predecessor=Predecessor("turn"))
    harness.run()
    assert harness.outcomes["next", 0].tokens == expected_output(whole, 9)
    assert inheritance(harness, "next").path == "match"


def test_search_result_can_be_predecessor() -> None:
    harness = Harness()
    harness.add("turn", prompt_of(50), 7, beam_width=3, n=3, retain_ttl=100.0)
    harness.run()
    said = harness.outcomes["turn", 0].results[2].ids.tolist()
    whole = prompt_of(50) + said + [1, 2]
    for rid, index in (("next", 2), ("other", 1)):
        harness.add(rid, whole, 9, predecessor=Predecessor("turn", index))
    harness.run()
    assert harness.outcomes["next", 0].tokens == harness.outcomes["other", 0].tokens == expected_output(whole, 9)
    assert inheritance(harness, "next").path == "handoff" and stands_alone(harness, "other")


@pytest.mark.parametrize("changed", [0, 49, 50, 56])
def test_prompt_differing_from_predecessor_is_computed_alone(changed: int) -> None:
    """The first and the last of the prompt, and of what was said."""
    harness = Harness()
    harness.add("turn", prompt_of(50), 7, retain_ttl=100.0)
    harness.run()
    whole = [*parent_ids(harness, "turn", prompt_of(50)), 1, 2]
    whole[changed] += 1
    harness.add("next", whole, 9, predecessor=Predecessor("turn"))
    harness.run()
    assert harness.outcomes["next", 0].tokens == expected_output(whole, 9) and stands_alone(harness, "next")
    assert len(harness.scheduler._leases) == 1, "another turn may go on from it"


def test_prompt_shorter_than_predecessor_is_computed_alone() -> None:
    harness = Harness()
    harness.add("turn", prompt_of(50), 7, retain_ttl=100.0)
    harness.run()
    whole = parent_ids(harness, "turn", prompt_of(50))[:-1]
    harness.add("next", whole, 9, predecessor=Predecessor("turn"))
    harness.run()
    assert harness.outcomes["next", 0].tokens == expected_output(whole, 9) and stands_alone(harness, "next")


def test_unusable_predecessor_is_ignored() -> None:
    """Unknown, running, aborted, of another namespace, another sample, or its name is somebody else's."""
    harness = Harness()
    prompt = prompt_of(50)
    harness.add("salted", prompt, 3, namespace="salt", retain_ttl=100.0)
    harness.add("renamed", prompt, 3, retain_ttl=100.0)
    harness.run()
    harness.add("renamed", [9, 9, 9], 3, retain_ttl=100.0)
    harness.run()
    harness.add("aborted", prompt, 3, retain_ttl=100.0)
    harness.step()
    harness.abort("aborted")
    harness.add("running", prompt, 30)
    harness.step()
    whole = prompt + expected_output(prompt, 3) + [1, 2]
    parents = [Predecessor(rid) for rid in ("nobody", "running", "aborted", "salted", "renamed")]
    for number, predecessor in enumerate([*parents, Predecessor("renamed", 5)]):
        harness.add(f"next{number}", whole, 4, predecessor=predecessor)
    assert harness.scheduler.num_parked == 0
    harness.run()
    for number in range(6):
        assert harness.outcomes[f"next{number}", 0].tokens == expected_output(whole, 4)
        assert stands_alone(harness, f"next{number}")


def test_first_of_two_successors_takes_the_lease() -> None:
    harness = Harness()
    harness.add("turn", prompt_of(50), 7, retain_ttl=100.0)
    harness.run()
    whole = parent_ids(harness, "turn", prompt_of(50))
    for rid, tail in (("one", [1]), ("two", [2])):
        harness.add(rid, whole + tail, 5, predecessor=Predecessor("turn"))
    harness.run()
    assert [inheritance(harness, rid).path for rid in ("one", "two")] == ["handoff", "match"]
    for rid, tail in (("one", [1]), ("two", [2])):
        assert harness.outcomes[rid, 0].tokens == expected_output(whole + tail, 5)
