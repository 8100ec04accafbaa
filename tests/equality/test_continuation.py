"""A continuation says what a replay of the same ids says: toy model, greedy and sampled, every page size and path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from baton.scheduler.request_spec import ContinuationSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import LocalWorker
from tests.doubles.specs import make_spec

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
CASES = ("parent runs", "parent ended", "evicted", "released", "traffic")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Held-out prompts of both languages."""
    from baton.runtime.text.tokenizer import Tokenizer
    from examples.toy_model.make_data import conversations

    tokenizer = Tokenizer.load(TOY)
    texts = [c.prompts()[0][0] for c in conversations(seed=99, count=8)]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [prompt for prompt in ids if len(prompt) < 400][:5]


def params(seed: int, greedy: bool, **more) -> SamplingParams:
    if greedy:
        return SamplingParams(temperature=0.0, **more)
    return SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=seed, **more)


def ids_of(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_continuation_equals_replay(prompts: list[list[int]], page_size: int, case: str, greedy: bool) -> None:
    options = {"max_total_tokens": 4096, "page_size": page_size, "chunked_prefill_size": 100, "max_leased_ratio": 0.9}
    worker = LocalWorker(TOY, **options)
    replay = LocalWorker(TOY, **options, disable_radix_cache=True)
    suffix = prompts[0][:3]
    first, second = params(1, greedy, max_new_tokens=20), params(2, greedy, max_new_tokens=16)
    parents = [make_spec(f"p{i}", ids_of(p), first, retain_ttl=1e9) for i, p in enumerate(prompts)]
    children = [
        make_spec(f"c{i}", ids_of(suffix), second, continuation=ContinuationSpec(f"p{i}")) for i in range(len(prompts))
    ]
    if case == "parent runs":
        answers = worker.run(parents + children)
        said, continued = answers[: len(prompts)], answers[len(prompts) :]
    else:
        said = worker.run(parents)
        if case == "evicted":
            worker.scheduler._memory.cache.evict(10**9)
        elif case == "released":
            for parent in parents:
                worker.scheduler.release_leases(parent.rid)
            worker.scheduler._memory.cache.evict(500)
        elif case == "traffic":
            rng = np.random.default_rng(0)
            noise = [rng.integers(0, 1000, 900).tolist() for _ in range(6)]
            worker.generate(noise, params(3, greedy, max_new_tokens=2))
        continued = worker.run(children)
    for prompt, answer, child in zip(prompts, said, continued):
        (alone,) = replay.generate([prompt], first)
        assert answer.tokens == alone.tokens
        ends = answer.finish is not None and answer.finish.type == "stop"
        kept = answer.tokens[:-1] if ends else answer.tokens
        (expected,) = replay.generate([prompt + kept + suffix], second)
        assert child.tokens == expected.tokens
        assert child.inheritance is not None
        found_nothing = child.inheritance.recomputed_tokens == child.inheritance.inherited_tokens
        without_a_lease = "fallback" if found_nothing else "match"
        assert child.inheritance.path == (without_a_lease if case == "released" else "handoff")
        assert case == "released" or child.inheritance.recomputed_tokens <= 1
