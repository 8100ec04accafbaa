"""Models with recurrent states through everything that happens between requests: each says what a replay of the same
ids says, which test_serving.py compares with transformers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from baton.scheduler.request_spec import ContinuationSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import Answer, LocalWorker
from tests.doubles.specs import make_spec
from tests.doubles.tiny_models import MODELS, save_reference

pytestmark = pytest.mark.equality

FAMILIES = ["lfm2", "qwen3_next", "granite_hybrid", "falcon_h1", "mamba2"]
NEW = 24
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    assert request.param in MODELS
    folder = tmp_path_factory.mktemp("model")
    save_reference(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def replay(folder: Path) -> LocalWorker:
    """Computes every prompt alone and anew."""
    return LocalWorker(folder, disable_radix_cache=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Five with a common beginning: shorter than a convolution's window, and longer than pages and chunks."""
    rng = random.Random(8)
    stem = [rng.randrange(131) for _ in range(75)]
    return [[7], *(stem[: rng.randrange(76)] + [rng.randrange(131) for _ in range(own)] for own in (3, 20, 40, 41))]


def ids_of(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def says(replay: LocalWorker, prompt: list[int], sampling: SamplingParams = GREEDY) -> list[int]:
    return replay.generate([prompt], sampling)[0].tokens


def continue_each(worker: LocalWorker, prompts: list[list[int]], **terms) -> tuple[list[Answer], list[Answer]]:
    """Answers to the prompts, and to what continues each with three more tokens."""
    parents = [make_spec(f"p{i}", ids_of(prompt), GREEDY, retain_ttl=1e9) for i, prompt in enumerate(prompts)]
    said = worker.run(parents)
    children = [
        make_spec(f"c{i}", ids_of([1, 2, 3]), GREEDY, continuation=ContinuationSpec(f"p{i}", **terms))
        for i in range(len(prompts))
    ]
    return said, worker.run(children)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("page_size", "chunk", "overlap"), [(16, 1, False), (1, 7, True), (16, 64, True), (1, 500, False)]
)
def test_a_handoff_recomputes_nothing(folder, replay, prompts, page_size, chunk, overlap) -> None:
    worker = LocalWorker(
        folder, page_size=page_size, chunked_prefill_size=chunk, max_leased_ratio=0.9, overlap=overlap, max_states=32
    )
    said, continued = continue_each(worker, prompts)
    for prompt, parent, child in zip(prompts, said, continued):
        assert parent.tokens == says(replay, prompt)
        assert child.tokens == says(replay, [*prompt, *parent.tokens, 1, 2, 3])
        assert child.inheritance is not None and child.inheritance.path == "handoff"
        assert child.inheritance.recomputed_tokens <= 1
    worker.scheduler.check_invariants()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_kept_parent_can_be_continued_again(folder, replay, prompts, page_size) -> None:
    worker = LocalWorker(folder, page_size=page_size, max_leased_ratio=0.9, max_states=48)
    said, first = continue_each(worker, prompts, keep_parent=True)
    again = [
        make_spec(f"d{i}", ids_of([9, 8]), GREEDY, continuation=ContinuationSpec(f"p{i}")) for i in range(len(prompts))
    ]
    for prompt, parent, one, two in zip(prompts, said, first, worker.run(again)):
        assert one.tokens == says(replay, [*prompt, *parent.tokens, 1, 2, 3])
        assert two.tokens == says(replay, [*prompt, *parent.tokens, 9, 8])
        assert two.inheritance is not None and two.inheritance.recomputed_tokens <= 1
    worker.scheduler.check_invariants()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_cached_is_used_as_far_as_states_reach(folder, replay, prompts, page_size) -> None:
    """The second request that shares a beginning leaves a state at its end, which the third finds. Long pages end
    there anyway: the first prompt's last whole page."""
    worker = LocalWorker(folder, page_size=page_size, max_states=32)
    stem = prompts[-1][:48]
    for number, tail in enumerate(([1, 2], [3, 4], [5, 6])):
        (answer,) = worker.generate([stem + tail], GREEDY)
        assert answer.tokens == says(replay, stem + tail)
        assert answer.cached_tokens == (48 if number == 2 or (number == 1 and page_size == 16) else 0)
    (edited,) = worker.generate([[*stem, 5, 6, *says(replay, [*stem, 5, 6])[:-1], 4]], GREEDY)
    assert edited.cached_tokens >= 48


@pytest.mark.one_in(2)
@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_same_prompt_again_computes_its_last_token_or_page(folder, replay, prompts, page_size, chunk) -> None:
    worker = LocalWorker(folder, page_size=page_size, max_states=32, chunked_prefill_size=chunk)
    for prompt in prompts:
        first, again = (worker.generate([prompt], GREEDY)[0] for _ in range(2))
        assert first.tokens == again.tokens == says(replay, prompt)
        assert again.cached_tokens == (len(prompt) - 1) // page_size * page_size


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("states", [3, 64])
def test_retraction_changes_nothing(folder, replay, prompts, page_size, states) -> None:
    """Too little memory for K and V, or too few states, for all to run together."""
    sampling = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    worker = LocalWorker(
        folder, max_total_tokens=192 if page_size == 1 else 256, page_size=page_size, max_states=states
    )
    for prompt, answer in zip(prompts, worker.generate(prompts, sampling)):
        assert answer.tokens == says(replay, prompt, sampling)
    assert states < 64 or worker.scheduler.stats().retractions > 0
    worker.scheduler.check_invariants()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [1, 16])
def test_guesses_change_nothing(folder, replay, page_size) -> None:
    """A prompt that repeats itself, so that guesses come, and are right and wrong."""
    worker = LocalWorker(folder, page_size=page_size, max_states=48, speculative_algorithm="NGRAM")
    pattern = [5, 9, 5, 9, 77, 5, 9]
    for prompt in (pattern * 6, [4, *pattern * 3], pattern * 6):
        (answer,) = worker.generate([prompt], GREEDY)
        assert answer.tokens == says(replay, prompt)
    worker.scheduler.check_invariants()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_beam_search_finds_the_same(folder, prompts, page_size) -> None:
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0, beam_width=4, n=3, ignore_eos=True)
    roomy = LocalWorker(folder, page_size=page_size, max_states=48)
    tight = LocalWorker(folder, page_size=page_size, max_states=8, chunked_prefill_size=7)
    for one, other in zip(*(worker.generate(prompts, sampling) for worker in (roomy, tight)), strict=True):
        assert one.beams is not None and other.beams is not None
        assert [r.ids.tolist() for r in one.beams.results] == [r.ids.tolist() for r in other.beams.results]
        np.testing.assert_allclose(
            [r.score for r in one.beams.results], [r.score for r in other.beams.results], atol=1e-4
        )
    tight.scheduler.check_invariants()
