"""Who waits for whose prefix: the same answers as by comparing every pair of prompts from its first token."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.discarding import drop_path
from baton.scheduler.memory.shared_prefixes import SharedPrefixes
from baton.scheduler.request import Request
from baton.scheduler.request_spec import LogprobOptions
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness
from tests.doubles.specs import make_spec

MIN = 32


def slow_answer(harness: Harness, request: Request, added: list[Request]) -> bool:
    """The longest start in common with any of them, less what is cached of it."""
    mine, best = request.token_ids.view(), 0
    for other in added:
        if other.namespace != request.namespace:
            continue
        theirs = other.token_ids.view(0, len(mine))
        differs = theirs != mine[: len(theirs)]
        best = max(best, int(differs.argmax()) if differs.any() else len(theirs))
    common = min(best, request.prefix_limit)
    if common < MIN:
        return False
    cached = harness.cache.match_len(request.namespace, request.token_ids.view(0, common))
    return common - common % harness.config.page_size - cached >= MIN


def open_request(harness: Harness, request: Request) -> bool:
    """Admit it by hand, so that it holds what is cached of it."""
    return harness.scheduler._memory.open_request(request, 0, 0.0)


class Scene:
    """Prompts of few pieces, so that they share much; some are cached, some computed, some only in part."""

    def __init__(self, seed: int, page: int) -> None:
        self.rng = random.Random(seed)
        self.harness = Harness(num_tokens=16_384, page_size=page, rows=64, context=1024, chunk=8192)
        self.pieces = [prompt_of(length, seed + length) for length in (7, 31, 32, 33, 64, 65, 130, 200)]
        self.number = 0

    def prompt(self) -> list[int]:
        pieces = [self.rng.choice(self.pieces) for _ in range(self.rng.randrange(1, 5))]
        prompt = [token for piece in pieces for token in piece]
        return [*prompt[: self.rng.randrange(1, len(prompt) + 1)], 5]

    def request(self) -> Request:
        self.number += 1
        logprobs = LogprobOptions(self.rng.randrange(len(self.pieces)), 0) if self.rng.random() < 0.2 else None
        prompt = self.prompt()
        if logprobs is not None:
            logprobs = LogprobOptions(self.rng.randrange(len(prompt)), 0)
        spec = make_spec(
            f"r{self.number}",
            prompt,
            SamplingParams(max_new_tokens=4, temperature=0.0),
            namespace=self.rng.choice(["", "", "", "salt"]),
            logprobs=logprobs,
        )
        (request,) = self.harness.scheduler.add_request(spec, 0.0)
        return request

    def fill_cache(self) -> None:
        for _ in range(4):
            self.number += 1
            self.harness.add(f"r{self.number}", self.prompt(), 1, namespace=self.rng.choice(["", "salt"]))
        self.harness.run()


@PAGES
@pytest.mark.parametrize("seed", range(4))
def test_will_be_cached_matches_full_comparison(seed: int, page_size: int) -> None:
    answers = set()
    for turn in range(5):
        scene = Scene(10 * seed + turn, page_size)
        scene.fill_cache()
        shared, added = SharedPrefixes(scene.harness.cache, MIN), []
        for _ in range(50):
            request = scene.request()
            expected = slow_answer(scene.harness, request, added)
            assert shared.will_be_cached(request) == expected
            answers.add(expected)
            if not expected and open_request(scene.harness, request):
                shared.add_request(request)
                added.append(request)
    assert answers == {False, True}, "the scenes tell them apart"


def test_long_cached_prefixes_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only token ids that are not cached are compared."""
    scene = Scene(1, 1)
    stem = prompt_of(900, 77)
    scene.harness.add("first", stem, 1)
    scene.harness.run()
    compared: list[int] = []
    array_equal = np.array_equal
    monkeypatch.setattr(np, "array_equal", lambda a, b: (compared.append(len(a)), array_equal(a, b))[1])
    shared = SharedPrefixes(scene.harness.cache, MIN)
    tails = [prompt_of(50, 1), prompt_of(50, 2), prompt_of(50, 1)]
    answers = []
    for number, tail in enumerate(tails):
        params = SamplingParams(max_new_tokens=4, temperature=0.0)
        (request,) = scene.harness.scheduler.add_request(make_spec(f"t{number}", stem + tail, params), 0.0)
        answers.append(shared.will_be_cached(request))
        if not answers[-1]:
            assert open_request(scene.harness, request)
            shared.add_request(request)
    assert answers == [False, False, True]
    assert compared == [0]


@pytest.mark.parametrize("alike", [True, False])
def test_equal_tail_after_different_prefix_is_not_shared(alike: bool) -> None:
    """Both begin alike, are cached equally far, and go on alike; in between they differ."""
    scene = Scene(1, 1)
    head, tail = prompt_of(64, 1), prompt_of(64, 2)
    middles = [prompt_of(64, 3), prompt_of(64, 3 if alike else 4)]
    for number, middle in enumerate(middles):
        scene.harness.add(f"first {number}", head + middle, 1)
        scene.harness.run()
    params = SamplingParams(max_new_tokens=4, temperature=0.0)
    specs = [make_spec(f"r{number}", head + middle + tail, params) for number, middle in enumerate(middles)]
    first, second = (scene.harness.scheduler.add_request(spec, 0.0)[0] for spec in specs)
    shared = SharedPrefixes(scene.harness.cache, MIN)
    assert not shared.will_be_cached(first) and open_request(scene.harness, first)
    shared.add_request(first)
    assert shared.will_be_cached(second) == alike == slow_answer(scene.harness, second, [first])


@PAGES
def test_closed_request_is_not_waited_for(page_size: int) -> None:
    scene = Scene(1, page_size)
    params = SamplingParams(max_new_tokens=4, temperature=0.0)
    prompt = prompt_of(200, 1)
    first, second, third = (
        scene.harness.scheduler.add_request(make_spec(f"r{number}", prompt, params), 0.0)[0] for number in range(3)
    )
    shared = SharedPrefixes(scene.harness.cache, MIN)
    assert open_request(scene.harness, first)
    shared.add_request(first)
    assert shared.will_be_cached(second)
    scene.harness.scheduler._memory.close_request(first, None)
    assert not shared.will_be_cached(second) and not shared.will_be_cached(third)


@PAGES
def test_prefix_of_waiting_prompt_may_vanish_before_admission(page_size: int) -> None:
    """Evicted, or dropped: the look-up begins at the root again, and the output is right."""
    for how in ("evict", "drop", "nothing"):
        harness = Harness(num_tokens=2048, page_size=page_size, rows=2, context=512, chunk=256)
        stem = prompt_of(128, 4)
        harness.add("first", stem, 1)
        harness.run()
        tail = prompt_of(100, 9)
        harness.add("runs", stem + tail + [1], 30)
        harness.add("waits", stem + tail + [2], 30)
        harness.step()
        request = harness.outcomes["waits", 0].request
        assert request is not None and request.kv is None and request.prefix_node is not None
        node = request.prefix_node
        if how == "evict":
            harness.abort("runs")
            harness.cache.evict(10_000)
            assert node.parent is None
        elif how == "drop":
            drop_path(harness.cache, node)
        harness.run()
        assert harness.outcomes["waits", 0].tokens == expected_output(stem + tail + [2], 30)
        found = 0 if how != "nothing" else 228 - 228 % page_size
        assert request.found.total == found and request.prefix_node is None
