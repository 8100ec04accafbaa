"""Where drafts come from, with the harness's real requests and tree."""

from __future__ import annotations

import pytest

from baton.scheduler.request import Request
from baton.scheduler.speculation.drafts import Draft
from baton.scheduler.speculation.sequence_drafts import SequenceDrafts, Source
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness


def drafting(**options) -> Harness:
    return Harness(speculative_algorithm="NGRAM", **options)


def running(harness: Harness, prompt: list[int], **options) -> Request:
    """A request whose prompt is computed, and which has said one token."""
    rid = f"r{len(harness.outcomes)}"
    harness.add(rid, prompt, 60, **options)
    harness.step()
    request = harness.outcomes[rid, 0].request
    assert request is not None and request.num_output_tokens == 1
    return request


def draft(
    harness: Harness, request: Request, most: int = 6, skipped: int = 0, ends: frozenset[int] = frozenset()
) -> Draft | None:
    return harness.scheduler._speculation._drafter.find_draft(request, SequenceDrafts(ends), skipped, most)


def saying(request: Request, *tokens: int) -> Request:
    """As if it had said these, too."""
    for token in tokens:
        request.token_ids.append(token)
    return request


def tokens_of(found: Draft | None) -> list[int]:
    assert found is not None
    return found.tokens.tolist()


@PAGES
def test_the_path_that_an_equal_request_has_left(page_size: int) -> None:
    harness = drafting(page_size=page_size, num_tokens=1024)
    harness.add("first", prompt_of(70), 130)
    harness.run()
    expected = expected_output(prompt_of(70), 130)
    cached = (70 + 129) // page_size * page_size - 70
    request = running(harness, prompt_of(70))
    for known in range(1, 100):
        found = draft(harness, request, most=9)
        if known + 9 <= cached:
            assert (
                found is not None
                and found.source is Source.PATH
                and found.tokens.tolist() == expected[known : known + 9]
            )
        saying(request, expected[known])
    saying(request, 999)
    state = SequenceDrafts(frozenset())
    harness.scheduler._speculation._drafter.find_draft(request, state, 0, 9)
    assert not state.on_path, "it has left the path for good"


def test_its_own_text_longest_ngram_first() -> None:
    request = saying(running(harness := drafting(), [1, 2, 3, 4, 50, 51, 52, 7, 3, 4, 60, 61]), 1, 2, 3, 4)
    found = draft(harness, request)
    assert found is not None and (found.source, tokens_of(found)) == (Source.OWN_4, [50, 51, 52, 7, 3, 4])
    saying(request, 9, 3, 4)
    found = draft(harness, request, most=1)
    assert found is not None and (found.source, tokens_of(found)) == (Source.OWN_2, [9])


def test_lines_that_repeat_go_on_repeating() -> None:
    request = saying(running(harness := drafting(), [9]), *[1, 2, 3] * 4)
    assert tokens_of(draft(harness, request, most=10)) == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_what_others_have_said() -> None:
    harness = drafting()
    prompt = prompt_of(30)
    harness.add("other", prompt, 30)
    harness.run()
    said = expected_output(prompt, 30)
    request = saying(running(harness, prompt_of(20, 1)), *said[3:7])
    found = draft(harness, request, most=4)
    assert found is not None and (found.source, tokens_of(found)) == (Source.PAST_4, said[7:11])
    request = saying(running(harness, prompt_of(21, 1)), *said[3:11])
    found = draft(harness, request, most=4)
    assert found is not None and found.source is Source.PAST_8
    request = saying(running(harness, prompt_of(20, 2), namespace="salt"), *said[3:7])
    assert draft(harness, request) is None, "namespaces share nothing"
    harness.run()
    assert harness.scheduler.flush_cache()
    request = saying(running(harness, prompt_of(20, 3)), *said[3:7])
    assert draft(harness, request) is None


def test_its_own_text_goes_before_that_of_others() -> None:
    harness = drafting()
    prompt = prompt_of(30)
    harness.add("other", prompt, 30)
    harness.run()
    said = expected_output(prompt, 30)
    request = saying(running(harness, [*said[3:7], 77, 78, 5]), *said[3:7])
    assert tokens_of(draft(harness, request, most=2)) == [77, 78]


def test_a_draft_ends_before_what_would_end_the_sequence() -> None:
    request = saying(running(harness := drafting(), [1, 2, 50, 51, 52, 53, 7]), 1, 2)
    assert tokens_of(draft(harness, request, ends=frozenset({52, 7}))) == [50, 51]
    assert draft(harness, request, ends=frozenset({50})) is None


@pytest.mark.parametrize("skipped", [1, 2])
def test_what_is_in_flight_is_guessed_too(skipped: int) -> None:
    request = saying(running(harness := drafting(), [1, 2, 50, 51, 52, 53, 7]), 1, 2)
    assert tokens_of(draft(harness, request, most=2, skipped=skipped)) == [50, 51, 52, 53][skipped : skipped + 2]
    assert draft(harness, request, skipped=1, ends=frozenset({50})) is None
