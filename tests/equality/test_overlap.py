"""The overlapped loop says what the plain one says, token for token, whatever requests ask for; under pressure too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_worker import Answer, LocalWorker

from baton.scheduler.item_trie import ItemTrie
from baton.scheduler.request import LogprobOptions, RequestSpec
from baton.scheduler.sampling_params import SamplingParams

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
SEED = 7

WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.4, "ignore_eos": True},
    {"temperature": 0.0, "frequency_penalty": 0.9, "presence_penalty": 0.4, "ignore_eos": True},
    {"temperature": 1.0, "seed": 7, "repetition_penalty": 0.8, "frequency_penalty": -0.3, "ignore_eos": True},
    {"temperature": 0.0, "logit_bias": {300: 8.0, 310: 4.0}, "min_new_tokens": 9},
    {"temperature": 0.0, "stop": ("```", "lines")},
    {"temperature": 0.8, "seed": 8, "stop": ("a", "e "), "no_stop_trim": True},
    {"temperature": 0.0, "stop_token_ids": tuple(range(300, 700))},
    {"temperature": 0.0, "item_trie": "items"},
    {"temperature": 0.0, "beam_width": 4, "n": 4},
]


def specs(items: ItemTrie) -> list[RequestSpec]:
    rng = random.Random(SEED)
    shared = [rng.randrange(1600) for _ in range(40)]
    made = []
    for number in range(3 * len(WISHES)):
        wish = WISHES[number % len(WISHES)]
        prompt = shared[: rng.randrange(1, 40)] + [rng.randrange(1600) for _ in range(rng.randrange(1, 60))]
        params = SamplingParams(max_new_tokens=rng.randrange(9, 40), **wish)
        logprobs = LogprobOptions(rng.choice([-1, 0]), 2) if number % 4 == 0 else None
        trie = items if params.item_trie else None
        made.append(
            RequestSpec(f"r{number}", np.array(prompt, dtype=np.int32), params, logprobs=logprobs, item_trie=trie)
        )
    return made


def said(answer: Answer) -> tuple:
    beams = [] if answer.beams is None else [(r.ids.tolist(), r.finish) for r in answer.beams.results]
    return answer.tokens, answer.finish, beams


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1},
        {"page_size": 16, "chunked_prefill_size": 33},
        {"page_size": 64, "chunked_prefill_size": 64, "max_running_requests": 9},
        {"page_size": 1, "max_total_tokens": 400, "max_running_requests": 20},
        {"page_size": 16, "disable_radix_cache": True},
    ],
    ids=str,
)
def test_both_loops_say_the_same(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(SEED)
    items = ItemTrie.build(rng.integers(0, 1600, (300, 3), dtype=np.int32))
    plain, overlapped = (LocalWorker(TOY, overlap=overlap, **options) for overlap in (False, True))
    for worker in (plain, overlapped):
        worker.scheduler._reserve._ratio = 0.0  # so that a small pool is over-committed
    expected, got = plain.run(specs(items)), overlapped.run(specs(items))
    for spec, one, other in zip(specs(items), expected, got, strict=True):
        assert said(one) == said(other), (SEED, spec.rid, spec.sampling)
        for kind in ("output_logprobs", "input_logprobs"):  # chunks of a prompt may be cut elsewhere
            chunks, twins = getattr(one, kind), getattr(other, kind)
            assert bool(chunks) == bool(twins)
            if chunks:
                ids, twin_ids = (np.concatenate([c.ids for c in side]) for side in (chunks, twins))
                np.testing.assert_array_equal(ids, twin_ids)
                values, twin_values = (np.concatenate([c.values for c in side]) for side in (chunks, twins))
                np.testing.assert_allclose(values, twin_values, atol=1e-4)
    if options.get("max_total_tokens") == 400:
        assert overlapped.scheduler.stats().retractions > 0, "the test needs pressure"


def test_nothing_is_computed_in_vain_where_nothing_stops_early() -> None:
    """Each sequence costs prompt + output - 1 tokens: the step in flight is counted when the next one is formed."""
    worker = LocalWorker(TOY, overlap=True, disable_radix_cache=True)
    scheduled = 0
    launch = worker.executor.launch

    def count(batch, previous):
        nonlocal scheduled
        scheduled += int(batch.extend_lens.sum())
        return launch(batch, previous)

    worker.executor.launch = count
    lengths = [(3, 1), (20, 2), (70, 30), (41, 17)]
    prompts = [list(range(100, 100 + length)) for length, _ in lengths]
    worker.generate(
        prompts, [SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True) for _, new in lengths]
    )
    assert scheduled == sum(length + new - 1 for length, new in lengths)
