"""Models with sliding windows in a pool of their own, through everything that happens between requests: each says what
a worker with one pool for all layers says, which test_serving.py compares with transformers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from baton.runtime.config import TierConfig
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import LocalWorker
from tests.doubles.tiny_models import save_reference
from tests.equality.test_hybrids import GREEDY, continue_each, says

pytestmark = pytest.mark.equality


@pytest.fixture(scope="module", params=["gemma3", "gemma2", "gpt_oss", "mistral, window"])
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_reference(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def replay(folder: Path) -> LocalWorker:
    """Computes every prompt alone and anew, and has one pool: as large as the KV pool, that for windows is none."""
    worker = LocalWorker(folder, disable_radix_cache=True, swa_full_tokens_ratio=1.0)
    assert worker.scheduler._memory.windows is None
    return worker


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(8)
    stem = [rng.randrange(131) for _ in range(75)]
    return [[7], *(stem[: rng.randrange(76)] + [rng.randrange(131) for _ in range(own)] for own in (3, 20, 40, 41))]


def serve(folder: Path, ratio: float = 0.2, **options) -> LocalWorker:
    worker = LocalWorker(folder, swa_full_tokens_ratio=ratio, **{"max_total_tokens": 1024, **options})
    assert worker.scheduler._memory.windows is not None
    return worker


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("page_size", "chunk", "overlap"), [(16, 7, False), (1, 7, True), (1, 64, True)])
def test_a_handoff_recomputes_nothing(folder, replay, prompts, page_size, chunk, overlap) -> None:
    worker = serve(folder, 0.4, page_size=page_size, chunked_prefill_size=chunk, max_leased_ratio=0.9, overlap=overlap)
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
    worker = serve(folder, 0.6, page_size=page_size, chunked_prefill_size=64, max_leased_ratio=0.9)
    said, continued = continue_each(worker, prompts, keep_parent=True)
    for prompt, parent, child in zip(prompts, said, continued):
        assert child.tokens == says(replay, [*prompt, *parent.tokens, 1, 2, 3])
    worker.scheduler.check_invariants()


def test_what_is_cached_is_used_as_far_as_windows_are_whole(folder, replay, prompts) -> None:
    """The second request that shares a beginning leaves a window at its end, which the third finds."""
    worker = serve(folder, 0.3, chunked_prefill_size=100)
    stem = prompts[-1][:70]
    for number, tail in enumerate(([1] * 45, [3, 4] * 20, [5, 6] * 20)):
        (answer,) = worker.generate([stem + tail], GREEDY)
        assert answer.tokens == says(replay, stem + tail)
        assert answer.cached_tokens == (70 if number == 2 else 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [1, 16])
def test_retraction_changes_nothing(folder, replay, page_size) -> None:
    """Too few slots for the windows of all, and a chunk that is longer than the window."""
    prompts = [[number, 5] for number in range(8)]
    sampling = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    worker = serve(folder, 0.12, page_size=page_size, chunked_prefill_size=25)
    for prompt, answer in zip(prompts, worker.generate(prompts, sampling)):
        assert answer.tokens == says(replay, prompt, sampling)
    assert worker.scheduler.stats().retractions > 0
    worker.scheduler.check_invariants()


def test_guesses_change_nothing(folder, replay) -> None:
    worker = serve(folder, 0.2, chunked_prefill_size=32, speculative_algorithm="NGRAM")
    pattern = [5, 9, 5, 9, 77, 5, 9]
    for prompt in (pattern * 6, [4, *pattern * 3], pattern * 6):
        (answer,) = worker.generate([prompt], GREEDY)
        assert answer.tokens == says(replay, prompt)
    worker.scheduler.check_invariants()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_beam_search_finds_the_same(folder, prompts, page_size) -> None:
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0, beam_width=4, n=3, ignore_eos=True)
    roomy = LocalWorker(folder, page_size=page_size, swa_full_tokens_ratio=1.0)
    tight = serve(folder, 0.25, page_size=page_size, chunked_prefill_size=7)
    for one, other in zip(*(worker.generate(prompts, sampling) for worker in (roomy, tight)), strict=True):
        assert one.beams is not None and other.beams is not None
        assert [r.ids.tolist() for r in one.beams.results] == [r.ids.tolist() for r in other.beams.results]
        np.testing.assert_allclose(
            [r.score for r in one.beams.results], [r.score for r in other.beams.results], atol=1e-4
        )
    tight.scheduler.check_invariants()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_kv_that_comes_back_from_the_host_has_that_of_windows(folder, replay, policy, page_size, caplog) -> None:
    """With a host tier all layers share one pool, so a copy has all of them, however large --swa-full-tokens-ratio."""
    tiers = TierConfig(host_cache_ratio=8.0, host_write_policy=policy)
    with caplog.at_level("INFO"):
        worker = LocalWorker(folder, tiers=tiers, swa_full_tokens_ratio=0.2, page_size=page_size, max_total_tokens=400)
    assert "layers with a sliding window share the KV pool, because of the host tier" in caplog.text
    assert worker.scheduler._memory.windows is None
    rng = random.Random(4)
    talk = [rng.randrange(131) for _ in range(90)]
    for turn in range(3):
        (answer,) = worker.generate([talk], GREEDY)
        assert answer.tokens == says(replay, talk)
        assert turn == 0 or answer.found.host >= 60
        talk = [*talk, *answer.tokens, *(rng.randrange(131) for _ in range(5))]
        worker.end_copies()
        worker.scheduler._memory.leases.break_all()
        for _ in range(6):
            worker.generate([[rng.randrange(131) for _ in range(80)]], GREEDY)
            worker.end_copies()
    worker.scheduler.check_invariants()
    worker.close()


def test_kv_that_comes_back_from_disk_has_that_of_windows(folder, replay, tmp_path) -> None:
    rng = random.Random(5)
    talk = [rng.randrange(131) for _ in range(150)]
    for start in range(2):
        tiers = TierConfig(host_cache_ratio=2.0, disk_cache_path=str(tmp_path), disk_cache_gb=0.1)
        worker = LocalWorker(folder, tiers=tiers, max_total_tokens=1024)
        assert worker.scheduler._memory.windows is None
        (answer,) = worker.generate([talk], GREEDY)
        assert answer.tokens == says(replay, talk)
        assert answer.found.disk >= 128 * start
        worker.end_copies()
        worker.close()
