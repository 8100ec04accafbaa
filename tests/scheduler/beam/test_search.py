"""Beam searches in the scheduler, on the KV-echo model: whatever else goes on, the results are those of a search that
computes every beam from its tokens alone. The harness checks ownership and the memory bound after every step."""

from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.constraints.item_trie import ITEM, ItemTrie
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.beam_search_scene import DEPTHS, EOS, PROMPT, add, check, search
from tests.doubles.kv_echo import VOCAB
from tests.doubles.scheduler_harness import PAGES, Harness


@pytest.fixture(scope="module")
def items() -> ItemTrie:
    rng = np.random.default_rng(0)
    return ItemTrie.build(rng.integers(10, VOCAB, (200, 3), dtype=np.int32))


# -- alone -------------------------------------------------------------------------------------------------------------


@PAGES
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_search_matches_reference_from_tokens_alone(page_size, early_stopping, length_penalty) -> None:
    for width, new in ((1, 5), (4, 1), (4, 6), (7, 19)):
        harness = Harness(num_tokens=4096, page_size=page_size, rows=16, chunk=16, eos=EOS)
        params = search(width, new, n=width, early_stopping=early_stopping, length_penalty=length_penalty)
        add(harness, "a", PROMPT, params)
        harness.run()
        check(harness, "a", PROMPT, params)
        assert len(harness.outcomes["a", 0].results) == width


@PAGES
@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_search_with_prompts_around_page_boundaries(page_size, disable_radix_cache) -> None:
    for length in (1, 15, 16, 17, 63, 64, 65, 100):
        harness = Harness(
            num_tokens=4096, page_size=page_size, rows=8, chunk=32, disable_radix_cache=disable_radix_cache
        )
        params = search(5, 4, n=5)
        prompt = list(range(7, 7 + length))
        add(harness, "a", prompt, params)
        harness.run()
        check(harness, "a", prompt, params)


def test_search_end_options() -> None:
    for more in (
        {"ignore_eos": True},
        {"ignore_eos": True, "stop_token_ids": (11, 12, 13, 14, 15)},
        {"min_new_tokens": 4},
        {"no_stop_trim": True},
    ):
        harness = Harness(num_tokens=4096, rows=8, eos=EOS)
        params = search(6, 8, n=6, **more)
        add(harness, "a", PROMPT, params)
        harness.run()
        check(harness, "a", PROMPT, params)
        results = harness.outcomes["a", 0].results
        for result in results:
            assert len(result.ids) > more.get("min_new_tokens", 0)
            trimmed = result.finish.type == "stop" and not more.get("no_stop_trim")
            assert result.kept_tokens == len(result.ids) - trimmed
        if not more.get("ignore_eos"):
            assert any(result.finish.type == "stop" for result in results), "the test needs ends"


def test_search_results_are_ranked_by_score() -> None:
    harness = Harness(num_tokens=2048, rows=16, eos=EOS)
    add(harness, "a", PROMPT, search(12, 9, n=5))
    harness.run()
    outcome = harness.outcomes["a", 0]
    scores = [result.score for result in outcome.results]
    assert len(scores) == 5 and scores == sorted(scores, reverse=True)
    assert outcome.finish == outcome.results[0].finish and outcome.tokens == []
    for result in outcome.results:
        assert result.cumulative_logprob == pytest.approx(float(result.logprobs.sum()), abs=1e-5)
        assert result.score == pytest.approx(result.cumulative_logprob / len(result.ids), abs=1e-5)


# -- item tries --------------------------------------------------------------------------------------------------------


@PAGES
@DEPTHS
def test_item_trie_limits_search_to_items(items: ItemTrie, page_size, depth) -> None:
    harness = Harness(num_tokens=4096, page_size=page_size, rows=40, depth=depth, eos=EOS)
    params = search(16, 3, n=16, item_trie="items")
    add(harness, "a", PROMPT, params, trie=items)
    add(harness, "free", PROMPT, search(16, 3))
    harness.run()
    check(harness, "a", PROMPT, params, items)
    check(harness, "free", PROMPT, search(16, 3))
    results = harness.outcomes["a", 0].results
    assert len(results) == 16
    for result in results:
        nodes = np.zeros(1, dtype=np.int32)
        for token in result.ids:
            assert token in items.children(nodes)[1]
            nodes = items.advance(nodes, np.array([token]))
        assert items.is_leaf(nodes)[0] and result.finish.matched == ITEM and result.kept_tokens == 3


def test_search_over_items_of_several_lengths() -> None:
    rng = np.random.default_rng(1)
    short, middle, long = (rng.integers(low, low + 50, (40, 6), dtype=np.int32) for low in (10, 100, 200))
    short[:, 1:], middle[:, 3:] = -1, -1
    trie = ItemTrie.build(np.concatenate([short, middle, long]))
    harness = Harness(num_tokens=4096, page_size=16, rows=16)
    params = search(12, 6, n=12, length_penalty=0.0, item_trie="items")
    add(harness, "a", PROMPT, params, trie=trie)
    harness.run()
    check(harness, "a", PROMPT, params, trie)
    results = harness.outcomes["a", 0].results
    assert len(results) == 12 and {len(r.ids) for r in results} <= {1, 3, 6}
    assert all(r.finish.matched == ITEM for r in results)


def test_small_trie_reports_shortfall_of_results() -> None:
    trie = ItemTrie.build(np.array([[10, 11, 12], [10, 11, 13], [10, 20, -1]], dtype=np.int32))
    harness = Harness(num_tokens=1024, rows=16)
    add(harness, "a", PROMPT, search(8, 9, n=8, item_trie="items"), trie=trie)
    harness.run()
    outcome = harness.outcomes["a", 0]
    assert sorted(r.ids.tolist() for r in outcome.results) == [[10, 11, 12], [10, 11, 13], [10, 20]]
    assert outcome.request is not None and outcome.request.beams is not None
    assert "3 of 8" in str(outcome.request.beams.shortfall)
    # Two tokens suffice for one of the three.
    add(harness, "b", PROMPT, search(8, 2, n=8, item_trie="items"), trie=trie)
    harness.run()
    assert [r.ids.tolist() for r in harness.outcomes["b", 0].results] == [[10, 20]]
    with pytest.raises(RequestRefused, match="shortest item"):
        add(harness, "c", PROMPT, search(8, 1, item_trie="items"), trie=trie)


@DEPTHS
def test_item_trie_limits_sampling(items: ItemTrie, depth) -> None:
    harness = Harness(num_tokens=1024, rows=4, depth=depth, eos=EOS)
    for number in range(3):
        harness.add(f"r{number}", [number, *PROMPT], 8, trie=items)
    harness.run()
    for number in range(3):
        outcome = harness.outcomes[f"r{number}", 0]
        assert outcome.finish is not None and outcome.finish.matched == ITEM and len(outcome.tokens) == 3
        nodes = np.zeros(1, dtype=np.int32)
        for token in outcome.tokens:
            assert token in items.children(nodes)[1]
            nodes = items.advance(nodes, np.array([token]))


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_searches_that_can_never_fit_are_refused() -> None:
    harness = Harness(num_tokens=512, page_size=16, rows=8, context=600)
    with pytest.raises(RequestRefused, match="beam_width is 9, over 8"):
        add(harness, "rows", PROMPT, search(9, 3))
    with pytest.raises(RequestRefused, match=r"beam_width \(8\) in pages of 16 tokens can never fit"):
        add(harness, "pool", PROMPT, search(8, 60))
    with pytest.raises(RequestRefused, match="twice more for each of the 8 that retain_ttl keeps"):
        add(harness, "leases", PROMPT, search(8, 30, n=8), retain_ttl=1.0)
    add(harness, "first", list(range(500)), search(8, 1, n=8))  # the first tokens of all need no KV beside the prompt's
    add(harness, "fits", PROMPT, search(8, 30, n=8))
    harness.run()
    check(harness, "first", list(range(500)), search(8, 1, n=8))
    check(harness, "fits", PROMPT, search(8, 30, n=8))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.5),
        ("top_k", 5),
        ("top_p", 0.5),
        ("min_p", 0.1),
        ("seed", 3),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("n", 5),
        ("beam_width", 0),
        ("beam_width", 513),
        ("length_penalty", 11.0),
        ("min_new_tokens", 2),
    ],
)
def test_sampling_parameters_are_refused_in_searches(field, value) -> None:
    with pytest.raises(ValueError, match=f"^{field} is {value}"):
        SamplingParams(**{"beam_width": 4, "item_trie": "items", field: value})


@pytest.mark.parametrize(("field", "value"), [("length_penalty", 2.0), ("early_stopping", True)])
def test_search_parameters_need_beam_width(field, value) -> None:
    with pytest.raises(ValueError, match=f"^{field} is {value}; it needs a beam_width"):
        SamplingParams(**{field: value})
