"""Where drafts come from, with the harness's real requests and tree, and what is kept of past outputs."""

from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.request import Request
from baton.scheduler.speculation.drafts import (
    CONTEXT,
    MAX_NAMESPACES,
    MAX_TOKENS,
    SHORTEST,
    Draft,
    PastOutputs,
    SequenceDrafts,
    Source,
)
from baton.scheduler.token_buffer import TokenBuffer
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
def test_draft_follows_cached_path_of_equal_request(page_size: int) -> None:
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


def test_draft_from_own_text_prefers_longest_ngram() -> None:
    request = saying(running(harness := drafting(), [1, 2, 3, 4, 50, 51, 52, 7, 3, 4, 60, 61]), 1, 2, 3, 4)
    found = draft(harness, request)
    assert found is not None and (found.source, tokens_of(found)) == (Source.OWN_4, [50, 51, 52, 7, 3, 4])
    saying(request, 9, 3, 4)
    found = draft(harness, request, most=1)
    assert found is not None and (found.source, tokens_of(found)) == (Source.OWN_2, [9])


def test_draft_continues_repetition() -> None:
    request = saying(running(harness := drafting(), [9]), *[1, 2, 3] * 4)
    assert tokens_of(draft(harness, request, most=10)) == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_draft_from_past_outputs_of_namespace() -> None:
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


def test_draft_from_own_text_precedes_past_outputs() -> None:
    harness = drafting()
    prompt = prompt_of(30)
    harness.add("other", prompt, 30)
    harness.run()
    said = expected_output(prompt, 30)
    request = saying(running(harness, [*said[3:7], 77, 78, 5]), *said[3:7])
    assert tokens_of(draft(harness, request, most=2)) == [77, 78]


def test_draft_ends_before_an_end_token() -> None:
    request = saying(running(harness := drafting(), [1, 2, 50, 51, 52, 53, 7]), 1, 2)
    assert tokens_of(draft(harness, request, ends=frozenset({52, 7}))) == [50, 51]
    assert draft(harness, request, ends=frozenset({50})) is None


@pytest.mark.parametrize("skipped", [1, 2])
def test_draft_skips_tokens_in_flight(skipped: int) -> None:
    request = saying(running(harness := drafting(), [1, 2, 50, 51, 52, 53, 7]), 1, 2)
    assert tokens_of(draft(harness, request, most=2, skipped=skipped)) == [50, 51, 52, 53][skipped : skipped + 2]
    assert draft(harness, request, skipped=1, ends=frozenset({50})) is None


def said(past: PastOutputs, prompt: list[int], output: list[int], namespace: str = "") -> None:
    past.add_output(namespace, TokenBuffer(np.array(prompt + output, dtype=np.int32)), len(prompt))


def find(past: PastOutputs, ids: list[int], most: int = 9, namespace: str = "", longer_than: int = 0):
    size, tokens = past.find_match(namespace, np.array(ids, dtype=np.int32), longer_than, most)
    return size, tokens.tolist()


class TestPastOutputs:
    def test_past_outputs_find_following_tokens(self) -> None:
        past = PastOutputs()
        said(past, [1, 2, 3], [10, 11, 12, 13, 14, 15])
        said(past, [1, 2, 3], [20, 21, 22, 23])
        assert find(past, [7, 10, 11, 12, 13]) == (4, [14, 15]), "not what the next output began with"
        assert find(past, [7, 10, 11, 12, 13], most=1) == (4, [14])
        assert find(past, [1, 2, 3, 20]) == (4, [21, 22, 23])
        assert find(past, [11, 12, 13])[0] == 0, "so few tokens say nothing of others"
        assert find(past, [7, 10, 11, 12, 13], longer_than=SHORTEST)[0] == 0
        assert find(past, [20, 21, 22, 23]) == (4, []), "it ended there"

    def test_start_of_past_output_is_found_by_prompt_end(self) -> None:
        past = PastOutputs()
        said(past, list(range(100, 150)), [10, 11, 12, 13])
        assert find(past, list(range(150 - CONTEXT, 150))) == (8, [10, 11, 12, 13])
        assert find(past, list(range(100, 120)))[0] == 0, "the rest of the prompt is not kept"

    def test_namespaces_share_nothing(self) -> None:
        past = PastOutputs()
        said(past, [], [1, 2, 3, 4, 5], "mine")
        assert find(past, [1, 2, 3, 4], namespace="mine") == (4, [5])
        assert find(past, [1, 2, 3, 4]) == find(past, [1, 2, 3, 4], namespace="yours") == (0, [])

    def test_old_outputs_and_namespaces_are_forgotten(self) -> None:
        past = PastOutputs()
        said(past, [], [1, 2, 3, 4, 5], "old")
        said(past, [], [1, 2, 3, 4, 5])
        rng = np.random.default_rng(0)
        for _ in range(MAX_TOKENS // 1000 + 1):
            said(past, [], rng.integers(10, 5000, 1000).tolist())
        assert find(past, [1, 2, 3, 4])[0] == 0
        said(past, [], [1, 2, 3, 4, 6])
        assert find(past, [1, 2, 3, 4]) == (4, [6])
        assert len(past._texts[""].ids) <= MAX_TOKENS
        for number in range(MAX_NAMESPACES):
            said(past, [], [1, 2, 3, 4, 5], str(number))
        assert len(past._texts) == MAX_NAMESPACES
        assert find(past, [1, 2, 3, 4], namespace="old")[0] == 0

    def test_output_longer_than_limit_keeps_its_end(self) -> None:
        past = PastOutputs()
        said(past, [], list(range(2 * MAX_TOKENS)))
        last = 2 * MAX_TOKENS - 1
        assert find(past, [last - 4, last - 3, last - 2, last - 1]) == (4, [last])
        assert len(past._texts[""].ids) <= MAX_TOKENS
