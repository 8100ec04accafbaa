"""Beam searches in the scheduler as parents and children: what is inherited, leased, forgotten and kept on record."""

from __future__ import annotations

import numpy as np
import pytest

from baton.entrypoints.http_statuses import status_of
from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.outcome import RequestRefused
from tests.doubles.beam_search_scene import DEPTHS, EOS, PROMPT, add, add_child, check, search
from tests.doubles.kv_echo import expected_beams, expected_output
from tests.doubles.scheduler_harness import PAGES, Harness


@PAGES
@DEPTHS
def test_search_continues_parent_by_handoff(page_size, depth) -> None:
    harness = Harness(num_tokens=8192, page_size=page_size, rows=24, chunk=32, depth=depth)
    harness.add("think", PROMPT, 20, retain_ttl=50.0)
    harness.run()
    before = harness.model.computed_tokens
    add_child(harness, "think", "find", [40, 41], search(8, 3, n=8))
    harness.run()
    prompt = [*PROMPT, *expected_output(PROMPT, 20), 40, 41]
    check(harness, "find", prompt, search(8, 3, n=8))
    assert harness.model.computed_tokens - before == 3 + 2 * 8, "the last thought token, the suffix, two steps of beams"
    request = harness.outcomes["find", 0].request
    assert request is not None and request.inheritance is not None and request.inheritance.path == "handoff"


@PAGES
@pytest.mark.parametrize("disable_radix_cache", [False, True])
@pytest.mark.parametrize("when", ["parked", "later"])
def test_children_can_continue_any_search_result(page_size, disable_radix_cache, when) -> None:
    harness = Harness(
        num_tokens=8192, page_size=page_size, rows=24, chunk=32, eos=EOS, disable_radix_cache=disable_radix_cache
    )
    params = search(6, 8, n=4)
    add(harness, "find", PROMPT, params, retain_ttl=100.0)
    if when == "later":
        harness.run()
        assert len(harness.scheduler._leases) == 4
    for index in range(4):
        harness.continue_from("find", f"c{index}", [50 + index], 6, index=index, keep_parent=index == 0)
    harness.run()
    results = expected_beams(PROMPT, params, None, frozenset(EOS))
    for index, result in enumerate(results):
        prompt = [*PROMPT, *result.ids[: result.kept_tokens].tolist(), 50 + index]
        outcome = harness.outcomes[f"c{index}", 0]
        assert outcome.tokens == expected_output(prompt, 6, frozenset(EOS))
        assert outcome.request is not None and outcome.request.inheritance is not None
        inheritance = outcome.request.inheritance
        assert inheritance.path == "handoff" and inheritance.recomputed_tokens <= 1
        assert inheritance.inherited_tokens == len(prompt) - 1
    assert len(harness.scheduler._leases) == 1, "one was to be kept"
    harness.now += 1000.0
    harness.step()
    assert len(harness.scheduler._leases) == 0


def test_search_reports_refused_leases() -> None:
    harness = Harness(num_tokens=4096, page_size=16, rows=16, leases=2)
    add(harness, "find", PROMPT, search(6, 4, n=4), retain_ttl=100.0)
    harness.run()
    request = harness.outcomes["find", 0].request
    assert request is not None and request.beams is not None
    assert [bool(r.refused) for r in request.beams.retained if r is not None] == [False, False, True, True]
    harness.continue_from("find", "c3", [9], 4, index=3)
    harness.run()
    results = expected_beams(PROMPT, search(6, 4, n=4))
    prompt = [*PROMPT, *results[3].ids[: results[3].kept_tokens].tolist(), 9]
    assert harness.outcomes["c3", 0].tokens == expected_output(prompt, 4)


def test_retain_n_leases_only_the_best_results() -> None:
    harness = Harness(num_tokens=4096, page_size=16, rows=16, eos=EOS)
    params = search(6, 8, n=6)
    add(harness, "find", PROMPT, params, retain_ttl=100.0, retain_n=2)
    harness.add("samples", PROMPT, 4, n=3, retain_ttl=100.0, retain_n=1)
    harness.continue_from("find", "waits", [7], 4, index=4)
    harness.run()
    assert len(harness.scheduler._leases) == 3
    request = harness.outcomes["find", 0].request
    assert request is not None and request.beams is not None
    assert [retained is not None for retained in request.beams.retained] == [True, True, False, False, False, False]
    results = expected_beams(PROMPT, params, None, frozenset(EOS))
    for index, rid in ((4, "waits"), (5, "late")):
        if rid == "late":
            harness.continue_from("find", rid, [7], 4, index=index)
            harness.run()
        prompt = [*PROMPT, *results[index].ids[: results[index].kept_tokens].tolist(), 7]
        assert harness.outcomes[rid, 0].tokens == expected_output(prompt, 4, frozenset(EOS))
        request = harness.outcomes[rid, 0].request
        assert request is not None and request.inheritance is not None
        assert request.inheritance.path == ("handoff" if rid == "waits" else "match")


def test_impossible_search_continuations_are_refused() -> None:
    trie = ItemTrie.build(np.array([[10, 11, 12], [10, 11, 13]], dtype=np.int32))
    harness = Harness(num_tokens=1024, rows=16)
    add(harness, "find", PROMPT, search(4, 3, n=4, item_trie="items"), trie=trie)
    harness.continue_from("find", "second", [1], 4, index=1)
    harness.continue_from("find", "third", [1], 4, index=2)
    with pytest.raises(RequestRefused, match="not decided"):
        harness.continue_from("find", "now", [1], 4, at="now")
    with pytest.raises(RequestRefused, match="continuation_index is 4"):
        harness.continue_from("find", "fifth", [1], 4, index=4)
    harness.run()
    assert harness.outcomes["second", 0].finish is not None and harness.outcomes["second", 0].refusal is None
    refusal = harness.outcomes["third", 0].refusal
    assert refusal is not None and status_of(refusal) == 409 and "found 2 sequences" in refusal.message
    add(harness, "texts", PROMPT, search(4, 3, stop=("x",)))
    with pytest.raises(RequestRefused, match="stop strings"):
        harness.continue_from("texts", "child", [1], 4)


@PAGES
def test_retraction_drops_kv_of_finished_beams(page_size) -> None:
    """What had finished before stays a result; its lease is on the prompt alone, and its child computes the rest."""
    harness = Harness(num_tokens=4096, page_size=page_size, rows=24, chunk=64, eos=EOS)
    params = search(8, 12, n=8, early_stopping="never")
    add(harness, "a", PROMPT, params, retain_ttl=100.0)
    request = harness.outcomes["a", 0].request
    assert request is not None and request.beams is not None
    while not request.beams.finished:
        harness.step()
    assert harness.scheduler._decode.running == [request]
    harness.scheduler._retract(request)
    harness.verify()
    for index in range(8):
        harness.continue_from("a", f"c{index}", [], 5, index=index)
    harness.run()
    check(harness, "a", PROMPT, params)
    for index, result in enumerate(harness.outcomes["a", 0].results):
        prompt = [*PROMPT, *result.ids[: result.kept_tokens].tolist()]
        assert harness.outcomes[f"c{index}", 0].tokens == expected_output(prompt, 5, frozenset(EOS))


@PAGES
@pytest.mark.parametrize("keep_parent", [False, True])
def test_kv_never_copied_stays_out_of_the_tree(page_size, keep_parent) -> None:
    """The child of a result is opened, and closed again for want of memory, before any step has made the copies."""
    harness = Harness(num_tokens=4096, page_size=page_size, rows=24)
    params = search(6, 30, n=1)
    add(harness, "find", PROMPT, params, retain_ttl=100.0)
    harness.run()
    harness.continue_from("find", "child", [50], 6, keep_parent=keep_parent)
    calls = harness.allocator.calls + keep_parent  # with keep_parent the first is the fork
    harness.allocator.should_fail = lambda call: call == calls
    harness.run()
    result = expected_beams(PROMPT, params)[0]
    assert harness.outcomes["child", 0].tokens == expected_output([*PROMPT, *result.ids.tolist(), 50], 6)
    request = harness.outcomes["child", 0].request
    assert request is not None and request.inheritance is not None


def test_recorded_search_results_share_their_prompt() -> None:
    """A wide search takes no more of the record's budget than it has tokens, so that it drives nobody else off it."""
    harness = Harness(num_tokens=4096, rows=40)
    add(harness, "find", PROMPT, search(32, 3, n=32))
    harness.run()
    records = harness.scheduler._continuations._records
    assert records.held.total == len(PROMPT) + 32 * 3
    harness.scheduler.forget_record("find")
    assert records.held.total == 0
