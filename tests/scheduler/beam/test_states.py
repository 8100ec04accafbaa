"""Beam searches on a model with recurrent states: as few as there may be, and what leases get of them."""

from __future__ import annotations

import pytest

from baton.radix.lease import Lease, LeaseTerms
from baton.scheduler.beam.search import Hypothesis
from baton.scheduler.request import Request
from tests.doubles.beam_search_scene import add, add_child, check, search
from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness


@PAGES
@pytest.mark.parametrize(("states", "width"), [(2, 1), (3, 2), (4, 3), (6, 4)])
def test_widest_search_ends_with_fewest_states(states: int, width: int, page_size: int) -> None:
    """It gives up states that only a lease would need, and finds what it would find with more."""
    for seed in range(4):
        harness = Harness(states=states, page_size=page_size, num_tokens=2048)
        prompt, params = prompt_of(9 + seed, seed), search(width, 12, n=min(2, width))
        add(harness, "a", prompt, params, retain_ttl=100.0)
        harness.run()
        check(harness, "a", prompt, params)
        assert harness.scheduler.stats().retractions == 0


@PAGES
def test_leased_beam_is_continued_from_its_state(page_size: int) -> None:
    harness = Harness(states=32, page_size=page_size, num_tokens=2048)
    prompt, params = prompt_of(20), search(3, 8, n=2)
    add(harness, "a", prompt, params, retain_ttl=100.0)
    harness.run()
    computed = harness.model.computed_tokens
    add_child(harness, "a", "b", [7, 8, 9], search(2, 4))
    harness.run()
    said = harness.outcomes["a", 0].results[0].ids.tolist()
    check(harness, "b", [*prompt, *said, 7, 8, 9], search(2, 4))
    assert harness.model.computed_tokens - computed == 4 + 2 * 3  # the last token and the suffix, then both beams


@PAGES
@pytest.mark.parametrize("states", [4, 32])
def test_beam_cut_by_several_tokens_is_leased_up_to_its_prompt(
    states: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop string of three tokens ends it: no state is behind the last token that is inherited. With few states there
    is none of the prompt's whole pages either."""
    harness = Harness(states=states, page_size=page_size, num_tokens=2048)
    beams = harness.scheduler._beams
    retain = beams.retain_results

    def cut_and_retain(search: Request, results: list[Hypothesis], terms: LeaseTerms) -> list[Lease | None]:
        for result in results:
            result.kept_tokens -= 3
        return retain(search, results, terms)

    monkeypatch.setattr(beams, "retain_results", cut_and_retain)
    prompt, params = prompt_of(150), search(3, 8, n=2)
    add(harness, "a", prompt, params, retain_ttl=100.0)
    harness.run()
    group = harness.outcomes["a", 0].request.beams  # type: ignore[union-attr]
    retained = [each.tokens for each in group.retained]  # type: ignore[union-attr]
    assert retained == [150 - 150 % page_size if states == 32 else 0] * 2
    monkeypatch.undo()
    add_child(harness, "a", "b", [7, 8, 9], search(2, 4))
    harness.run()
    said = harness.outcomes["a", 0].results[0].ids.tolist()
    check(harness, "b", [*prompt, *said[:-3], 7, 8, 9], search(2, 4))
    inheritance = harness.outcomes["b", 0].request.inheritance  # type: ignore[union-attr]
    assert inheritance is not None and inheritance.path == ("handoff" if states == 32 else "fallback")
