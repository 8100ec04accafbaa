"""Beam searches in the scheduler, on the KV-echo model: whatever else goes on, the results are those of a search that
computes every beam from its tokens alone. The harness checks ownership and the memory bound after every step."""

from __future__ import annotations

import numpy as np
import pytest
from kv_echo import VOCAB, expected_beams, expected_output
from scheduler_harness import Harness

from baton.scheduler.beam_search import ITEM, Hypothesis
from baton.scheduler.item_trie import ItemTrie
from baton.scheduler.refusal import RequestRefused
from baton.scheduler.sampling_params import SamplingParams

EOS = tuple(range(0, VOCAB, 20))
PROMPT = list(range(1, 38))
PAGES = pytest.mark.parametrize("page_size", [1, 16, 64])
DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])


def search(width: int, new: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=new, beam_width=width, **more)


def said(results: list[Hypothesis]) -> list[tuple]:
    return [(r.ids.tolist(), r.score, r.cumulative_logprob, r.finish, r.kept_tokens) for r in results]


def add(harness: Harness, rid: str, prompt: list[int], params: SamplingParams, **more) -> None:
    given = {name: getattr(params, name) for name in params.__struct_fields__}
    for name in ("temperature", "max_new_tokens", "item_trie"):
        given.pop(name)
    assert params.max_new_tokens is not None
    harness.add(rid, prompt, params.max_new_tokens, **given, **more)


def check(harness: Harness, rid: str, prompt: list[int], params: SamplingParams, trie: ItemTrie | None = None) -> None:
    expected = expected_beams(prompt, params, trie, frozenset(harness.scheduler._eos_token_ids))
    assert said(harness.outcomes[rid, 0].results) == said(expected)


@pytest.fixture(scope="module")
def items() -> ItemTrie:
    rng = np.random.default_rng(0)
    return ItemTrie.build(rng.integers(10, VOCAB, (200, 3), dtype=np.int32))


# -- alone -------------------------------------------------------------------------------------------------------------


@PAGES
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_a_search_finds_what_its_tokens_alone_give(page_size, early_stopping, length_penalty) -> None:
    for width, new in ((1, 5), (4, 1), (4, 6), (7, 19)):
        harness = Harness(num_tokens=4096, page_size=page_size, rows=16, chunk=16, eos=EOS)
        params = search(width, new, n=width, early_stopping=early_stopping, length_penalty=length_penalty)
        add(harness, "a", PROMPT, params)
        harness.run()
        check(harness, "a", PROMPT, params)
        assert len(harness.outcomes["a", 0].results) == width


@PAGES
@pytest.mark.parametrize("disable_radix_cache", [False, True])
def test_every_length_of_prompt_against_the_page(page_size, disable_radix_cache) -> None:
    for length in (1, 15, 16, 17, 63, 64, 65, 100):
        harness = Harness(
            num_tokens=4096, page_size=page_size, rows=8, chunk=32, disable_radix_cache=disable_radix_cache
        )
        params = search(5, 4, n=5)
        prompt = list(range(7, 7 + length))
        add(harness, "a", prompt, params)
        harness.run()
        check(harness, "a", prompt, params)


def test_options_of_the_end() -> None:
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


def test_results_are_ranked_and_counted() -> None:
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


# -- beside others -----------------------------------------------------------------------------------------------------


@PAGES
@DEPTHS
def test_searches_and_requests_share_batches(page_size, depth) -> None:
    harness = Harness(num_tokens=8192, page_size=page_size, rows=40, chunk=24, depth=depth, eos=EOS)
    wanted = {}
    for number in range(4):
        prompt = [number, *PROMPT[: 20 + number]]
        wanted[f"s{number}"] = prompt, search(2 + 3 * number, 4 + number, n=2)
        add(harness, f"s{number}", *wanted[f"s{number}"])
        harness.add(f"r{number}", prompt[::-1], 12)
        harness.step()
    harness.run()
    for rid, (prompt, params) in wanted.items():
        check(harness, rid, prompt, params)
    for number in range(4):
        prompt = [number, *PROMPT[: 20 + number]][::-1]
        assert harness.outcomes[f"r{number}", 0].tokens == expected_output(prompt, 12, frozenset(EOS))


def test_searches_of_one_prompt_share_its_prefix() -> None:
    harness = Harness(num_tokens=4096, page_size=16, rows=32)
    prompt = list(range(100))
    for rid in ("a", "b", "c"):
        add(harness, rid, prompt, search(8, 4))
    harness.run()
    assert harness.model.computed_tokens <= 100 + 2 * 4 + 3 * 8 * 3, "96 of the prompt's tokens are computed once"
    for rid in ("a", "b", "c"):
        check(harness, rid, prompt, search(8, 4))


@PAGES
@DEPTHS
def test_retraction_keeps_what_a_search_knows(page_size, depth) -> None:
    """A pool that holds one of them at a time: the newest gives way, and goes on from the step it had reached."""
    pool = {1: 260, 16: 640, 64: 1280}[page_size]
    harness = Harness(num_tokens=pool, page_size=page_size, rows=40, chunk=64, depth=depth)
    harness.scheduler._reserve._ratio = 0.0  # admission is too careful for this test otherwise
    new = 40 if page_size == 64 else 16
    wanted = {f"s{n}": ([n, *PROMPT], search(8, new, n=8)) for n in range(3)}
    for rid, (prompt, params) in wanted.items():
        add(harness, rid, prompt, params)
    harness.add("plain", PROMPT, 40)
    harness.run()
    retracted = [outcome.request.retractions for outcome in harness.outcomes.values() if outcome.request is not None]
    assert sum(retracted) > 0, "the test needs pressure"
    for rid, (prompt, params) in wanted.items():
        check(harness, rid, prompt, params)
    assert harness.outcomes["plain", 0].tokens == expected_output(PROMPT, 40)


@PAGES
@DEPTHS
def test_abort_at_every_step_frees_everything(page_size, depth) -> None:
    for steps in range(12):
        harness = Harness(num_tokens=2048, page_size=page_size, rows=20, chunk=16, depth=depth)
        add(harness, "a", PROMPT, search(6, 9))
        add(harness, "b", PROMPT[5:], search(5, 7))
        for _ in range(steps):
            harness.step()
        harness.abort("a")
        harness.run()
        check(harness, "b", PROMPT[5:], search(5, 7))
        harness.scheduler.flush_cache()
        assert harness.allocator.free_tokens == 2048 and harness.pool.num_free == harness.pool.num_rows


def test_failed_allocations_at_any_point() -> None:
    for failing in range(30):
        harness = Harness(num_tokens=2048, page_size=16, rows=20, chunk=16)
        harness.allocator.should_fail = lambda call, failing=failing: call in (failing, failing + 1, failing + 5)
        add(harness, "a", PROMPT, search(6, 9, n=6))
        harness.add("r", PROMPT, 9)
        harness.run()
        check(harness, "a", PROMPT, search(6, 9, n=6))
        assert harness.outcomes["r", 0].tokens == expected_output(PROMPT, 9)


def test_a_failed_step_ends_the_search_and_spares_others() -> None:
    harness = Harness(num_tokens=2048, page_size=16, rows=20)
    add(harness, "a", PROMPT, search(6, 9))
    for _ in range(3):
        harness.step()
    assert harness.scheduler.next_batch(10.0) is not None
    harness._take(harness.scheduler.fail_step(10.0, "no"))
    harness.verify()
    finish = harness.outcomes["a", 0].finish
    assert finish is not None and finish.type == "abort"
    add(harness, "b", PROMPT, search(6, 9))
    harness.run()
    check(harness, "b", PROMPT, search(6, 9))


@pytest.mark.parametrize("first", range(1, 5))
def test_a_step_that_fails_takes_no_copies_of_a_search_that_waits(first: int) -> None:
    """The search has forked, but finds no slots while a step is in flight; then a prefill of another request fails."""
    prompt, params = list(range(first, first + 37)), search(4, 4, n=4)
    harness = Harness(num_tokens=4096, page_size=16, rows=8, depth=2)
    scheduler = harness.scheduler
    add(harness, "a", prompt, params)
    harness.add("r", [5, 5, 5], 30)
    request = scheduler.live_requests[0]
    while request.beam_kv is None or request.num_output_placeholders or not harness._results:
        harness.step()
    calls = harness.allocator.calls
    harness.allocator.should_fail = lambda call: call == calls + 1  # the first is the fork's
    assert scheduler.next_batch(harness.now) is None and harness.allocator.calls == calls + 2
    harness.add("p", [9] * 40, 3)
    harness._take(scheduler.process_result(harness._results.popleft(), harness.now))
    batch = scheduler.next_batch(harness.now)
    assert batch is not None and [r.rid for r in batch.requests] == ["p"]
    harness._take(scheduler.fail_step(harness.now, "no"))
    harness.run()
    finish = harness.outcomes["p", 0].finish
    assert finish is not None and finish.type == "abort"
    check(harness, "a", prompt, params)
    assert harness.outcomes["r", 0].tokens == expected_output([5, 5, 5], 30)


@PAGES
def test_a_search_that_is_nearly_done_keeps_little_room_free(page_size) -> None:
    pool, new, length = {1: (300, 60, 60), 16: (352, 60, 60), 64: (1088, 120, 200)}[page_size]
    harness = Harness(num_tokens=pool, page_size=page_size, rows=8)
    params = search(4, new, early_stopping="never")
    add(harness, "a", PROMPT, params)
    for _ in range(new - 10):
        harness.step()
    harness.add("r", list(range(500, 500 + length)), 5)
    request = harness.outcomes["r", 0].request
    assert request is not None
    for _ in range(2):
        harness.step()
    assert request.kv is not None and harness.outcomes["a", 0].finish is None
    harness.run()
    check(harness, "a", PROMPT, params)
    assert all(o.request is not None and o.request.retractions == 0 for o in harness.outcomes.values())


# -- item tries --------------------------------------------------------------------------------------------------------


@PAGES
@DEPTHS
def test_a_trie_limits_a_search_to_items(items: ItemTrie, page_size, depth) -> None:
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


def test_items_of_several_lengths() -> None:
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


def test_a_small_trie_gives_fewer_results_and_says_why() -> None:
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
def test_a_trie_limits_sampling_too(items: ItemTrie, depth) -> None:
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


# -- continuation ------------------------------------------------------------------------------------------------------


@PAGES
@DEPTHS
def test_a_search_continues_a_thought(page_size, depth) -> None:
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


def add_child(harness: Harness, parent: str, rid: str, suffix: list[int], params: SamplingParams, **more) -> None:
    given = {name: getattr(params, name) for name in params.__struct_fields__}
    for name in ("temperature", "max_new_tokens", "item_trie"):
        given.pop(name)
    assert params.max_new_tokens is not None
    harness.continue_from(parent, rid, suffix, params.max_new_tokens, **given, **more)


@PAGES
@pytest.mark.parametrize("disable_radix_cache", [False, True])
@pytest.mark.parametrize("when", ["parked", "later"])
def test_children_continue_any_of_the_results(page_size, disable_radix_cache, when) -> None:
    harness = Harness(
        num_tokens=8192, page_size=page_size, rows=24, chunk=32, eos=EOS, disable_radix_cache=disable_radix_cache
    )
    params = search(6, 8, n=4)
    add(harness, "find", PROMPT, params, retain_ttl=100.0)
    if when == "later":
        harness.run()
        assert len(harness.scheduler.leases) == 4
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
    assert len(harness.scheduler.leases) == 1, "one was to be kept"
    harness.now += 1000.0
    harness.step()
    assert len(harness.scheduler.leases) == 0


def test_a_lease_that_finds_no_room_is_refused_and_said() -> None:
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


def test_only_the_best_results_are_kept_where_that_is_asked_for() -> None:
    harness = Harness(num_tokens=4096, page_size=16, rows=16, eos=EOS)
    params = search(6, 8, n=6)
    add(harness, "find", PROMPT, params, retain_ttl=100.0, retain_n=2)
    harness.add("samples", PROMPT, 4, n=3, retain_ttl=100.0, retain_n=1)
    harness.continue_from("find", "waits", [7], 4, index=4)
    harness.run()
    assert len(harness.scheduler.leases) == 3
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


def test_what_cannot_be_continued() -> None:
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
    assert refusal is not None and refusal.status == 409 and "found 2 sequences" in refusal.message
    add(harness, "texts", PROMPT, search(4, 3, stop=("x",)))
    with pytest.raises(RequestRefused, match="stop strings"):
        harness.continue_from("texts", "child", [1], 4)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_can_never_be_served() -> None:
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
def test_parameters_that_make_no_sense_in_a_search(field, value) -> None:
    with pytest.raises(ValueError, match=f"^{field} is {value}"):
        SamplingParams(**{"beam_width": 4, "item_trie": "items", field: value})


@pytest.mark.parametrize(("field", "value"), [("length_penalty", 2.0), ("early_stopping", True)])
def test_parameters_that_need_a_search(field, value) -> None:
    with pytest.raises(ValueError, match=f"^{field} is {value}; it needs a beam_width"):
        SamplingParams(**{field: value})


@PAGES
def test_retraction_forgets_the_kv_of_finished_sequences(page_size) -> None:
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
def test_kv_that_was_to_be_copied_and_never_was_stays_out_of_the_tree(page_size, keep_parent) -> None:
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


def test_results_on_record_share_their_prompt() -> None:
    """A wide search takes no more of the record's budget than it has tokens, so that it drives nobody else off it."""
    harness = Harness(num_tokens=4096, rows=40)
    add(harness, "find", PROMPT, search(32, 3, n=32))
    harness.run()
    records = harness.scheduler._continuations._records
    assert records._num_tokens == len(PROMPT) + 32 * 3
    harness.scheduler.forget("find")
    assert records._num_tokens == 0
