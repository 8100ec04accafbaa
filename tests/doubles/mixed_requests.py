"""Requests for the toy model that ask for everything a request can ask for, between them, and what two workers must
have in common that answer them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.request_spec import LogprobOptions, RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import Answer
from tests.doubles.specs import make_spec

BANNED = ((311,), *((i, j) for i in range(280, 340) for j in (198, 281, 300, 335)), *((i, 311, 75) for i in range(400)))
"""Token sequences that the toy model likes to say."""

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
    {"temperature": 0.8, "seed": 9, "stop": ("lines",), "stop_regex": ("[aeiou]{2}|\\d", "(?i)the")},
    {"temperature": 0.0, "stop_token_ids": tuple(range(300, 700))},
    {"temperature": 0.0, "ignore_eos": True, "banned": BANNED},
    {"temperature": 0.9, "seed": 10, "banned": BANNED, "repetition_penalty": 1.1, "logit_bias": {300: 2.0}},
    {"temperature": 0.0, "item_trie": "items"},
    {"temperature": 0.0, "beam_width": 4, "n": 4},
]


def some_items(seed: int) -> ItemTrie:
    rng = np.random.default_rng(seed)
    return ItemTrie.build(rng.integers(0, 1600, (300, 3), dtype=np.int32))


def mixed_requests(seed: int) -> list[RequestSpec]:
    """Three of each kind, over prompts that share beginnings."""
    rng = random.Random(seed)
    shared = [rng.randrange(1600) for _ in range(40)]
    made = []
    for number in range(3 * len(WISHES)):
        wish = WISHES[number % len(WISHES)]
        prompt = shared[: rng.randrange(1, 40)] + [rng.randrange(1600) for _ in range(rng.randrange(1, 60))]
        banned = wish.get("banned", ())
        params = SamplingParams(
            max_new_tokens=rng.randrange(9, 40), **{name: value for name, value in wish.items() if name != "banned"}
        )
        named = (198, 311, 75) if number % 8 == 0 and "beam_width" not in wish else ()
        logprobs = LogprobOptions(rng.choice([-1, 0]), 2, token_ids=named) if number % 4 == 0 else None
        made.append(make_spec(f"r{number}", prompt, params, logprobs=logprobs, banned=banned))
    return made


def assert_same_answers(specs: list[RequestSpec], expected: list[Answer], found: list[Answer]) -> None:
    for spec, one, other in zip(specs, expected, found, strict=True):
        assert _said(one) == _said(other), (spec.rid, spec.sampling)
        for kind in ("output_logprobs", "input_logprobs"):  # chunks of a prompt may be cut elsewhere
            chunks, twins = getattr(one, kind), getattr(other, kind)
            assert bool(chunks) == bool(twins)
            if chunks:
                ids, twin_ids = (np.concatenate([c.ids for c in side]) for side in (chunks, twins))
                np.testing.assert_array_equal(ids, twin_ids)
                values, twin_values = (np.concatenate([c.values for c in side]) for side in (chunks, twins))
                np.testing.assert_allclose(values, twin_values, atol=1e-4)
                if spec.logprobs is not None and spec.logprobs.token_ids:
                    named, twin_named = (np.concatenate([c.named_values for c in side]) for side in (chunks, twins))
                    np.testing.assert_allclose(named, twin_named, atol=1e-4)


def _said(answer: Answer) -> tuple:
    beams = [] if answer.beams is None else [(r.ids.tolist(), r.finish) for r in answer.beams.results]
    return answer.tokens, answer.finish, beams
