"""Oracle: log_softmax of every logit, and a Python sort of all pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from baton.runtime.sampling import beam_candidates
from baton.runtime.sampling.beam_candidates import BeamRanker
from baton.runtime.sampling.sequences import SequenceState
from baton.scheduler.batch import BeamCandidates, BeamStep
from baton.scheduler.constraints.constraint import AllowedTokens
from baton.scheduler.request_spec import LogprobOptions
from tests.doubles.sampling_requests import make_sequence

EOS = (2, 5)


Search = tuple[BeamStep, SequenceState]


def make_step(start: int, rows: int, count: int, scores: np.ndarray | None = None, **options: Any) -> Search:
    """options: fields of BeamStep, and of SamplingParams."""
    fields = {name: options.pop(name) for name in ("bans_ends", "allowed") if name in options}
    top_k = options.pop("top_logprobs", None)
    logprobs = None if top_k is None else LogprobOptions(top_k=top_k)
    sequence = make_sequence(beam_width=512, serial=start, logprobs=logprobs, **options)
    scores = np.zeros(rows, dtype=np.float32) if scores is None else scores.astype(np.float32)
    return BeamStep(start, start, start + rows, count, scores, **fields), sequence


def rank(logits: torch.Tensor, searches: list[Search]) -> list[BeamCandidates]:
    steps, sequences = zip(*searches)
    return BeamRanker(logits.shape[1], EOS, "cpu").rank(logits, steps, sequences)


def slow_rank(logits: torch.Tensor, search: Search) -> list[tuple[float, int, int, float]]:
    """(score, beam, token, logprob) of all that is possible, best first. float32, and torch's own log_softmax."""
    step, sequence = search
    sampling, logprobs = sequence.sampling, logits.log_softmax(-1)
    total = logprobs.clone()
    for token_id, value in (sampling.logit_bias or {}).items():
        total[:, token_id] += value
    if step.bans_ends:
        total[:, [*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)]] = -torch.inf
    total += torch.from_numpy(step.scores)[:, None]
    if step.allowed is None:
        pairs = [(beam, token) for beam in range(logits.shape[0]) for token in range(logits.shape[1])]
    else:
        pairs = list(zip(*(array.tolist() for array in step.allowed.unpack())))
    possible = [(beam, token) for beam, token in pairs if torch.isfinite(total[beam, token])]
    ranking = [(float(total[b, t]), b, t, float(logprobs[b, t])) for b, t in possible]
    return sorted(ranking, key=lambda entry: (-entry[0], entry[1], entry[2]))


def check(found: BeamCandidates, logits: torch.Tensor, search: Search) -> None:
    step, _ = search
    expected = slow_rank(logits[step.start : step.stop], search)
    whole = {(beam, token): (score, logprob) for score, beam, token, logprob in expected}
    assert (found.parents.dtype, found.tokens.dtype) == (np.int32, np.int32)
    assert (found.scores.dtype, found.logprobs.dtype) == (np.float32, np.float32)
    pairs = list(zip(found.parents.tolist(), found.tokens.tolist()))
    assert len(set(pairs)) == len(pairs) == min(step.num_candidates, len(expected))
    np.testing.assert_allclose(found.scores, [e[0] for e in expected[: len(pairs)]], atol=3e-5)
    np.testing.assert_allclose(found.scores, [whole[pair][0] for pair in pairs], atol=3e-5)
    np.testing.assert_allclose(found.logprobs, [whole[pair][1] for pair in pairs], atol=3e-5)
    assert (np.diff(found.scores) <= 0).all()


def random_logits(rng: np.random.Generator, rows: int, vocab_size: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(scale=3.0, size=(rows, vocab_size)).astype(np.float32))


def random_allowed(rng: np.random.Generator, rows: int, vocab_size: int) -> AllowedTokens:
    chosen = rng.random((rows, vocab_size)) < rng.choice([0.01, 0.3, 1.0])
    beams, tokens = chosen.nonzero()
    return AllowedTokens.pack(beams.astype(np.int32), tokens.astype(np.int32))


def every_pair(rows: int, vocab_size: int) -> AllowedTokens:
    beams, tokens = (a.ravel().astype(np.int32) for a in np.indices((rows, vocab_size)))
    return AllowedTokens.pack(beams, tokens)


@pytest.mark.parametrize("vocab_size", [7, 128, 300, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_random_beam_batches_equal_full_sort(seed, vocab_size):
    rng = np.random.default_rng([seed, vocab_size])
    steps, start = [], 0
    for _ in range(int(rng.integers(1, 8))):
        rows = int(rng.choice([1, 3, 4]))
        options: dict[str, Any] = {"bans_ends": bool(rng.random() < 0.3), "ignore_eos": bool(rng.random() < 0.3)}
        if rng.random() < 0.4:
            options["logit_bias"] = {3: 6.0, 0: -100.0}
        if rng.random() < 0.5:
            options["stop_token_ids"] = (4, 6)
        if rng.random() < 0.4:
            options["allowed"] = random_allowed(rng, rows, vocab_size)
        count = int(rng.choice([1, 8, 8, 40, 5000]))
        steps.append(make_step(start, rows, count, rng.normal(scale=2.0, size=rows) - 5, **options))
        start += rows
    logits = random_logits(rng, start, vocab_size)
    before = logits.clone()
    found = rank(logits, steps)
    assert torch.equal(logits, before)
    for step, candidates in zip(steps, found, strict=True):
        check(candidates, logits, step)


@pytest.mark.parametrize("with_trie", [False, True])
def test_ties_go_to_the_lower_beam_then_the_lower_token(with_trie):
    """Equal rows of few distinct values: nearly everything is tied, across chunks too."""
    rng = np.random.default_rng(0)
    row = torch.from_numpy(rng.integers(0, 3, 700).astype(np.float32))
    allowed = every_pair(4, 700) if with_trie else None
    step = make_step(0, 4, 900, allowed=allowed)
    (found,) = rank(row.expand(4, -1).contiguous(), [step])
    order = np.lexsort((np.indices((4, 700))[1].ravel(), np.indices((4, 700))[0].ravel(), -row.repeat(4).numpy()))
    assert (found.parents * 700 + found.tokens).tolist() == order[:900].tolist()


def test_beam_candidates_are_batch_invariant():
    rng = np.random.default_rng(1)
    logits = random_logits(rng, 12, 500)
    steps = [
        make_step(0, 4, 8, rng.normal(size=4)),
        make_step(4, 4, 8, rng.normal(size=4), logit_bias={7: 5.0}),
        make_step(8, 4, 8, rng.normal(size=4), allowed=random_allowed(rng, 4, 500)),
    ]
    ranker = BeamRanker(500, EOS, "cpu")
    together = ranker.rank(logits, *zip(*steps))
    for (step, sequence), found in zip(steps, together):
        (alone,) = ranker.rank(logits[step.start : step.stop], [step], [sequence])
        for name in ("parents", "tokens", "scores", "logprobs"):
            assert np.array_equal(getattr(alone, name), getattr(found, name))


def test_first_step_with_one_beam_may_have_few_candidates():
    logits = random_logits(np.random.default_rng(2), 1, 9)
    step = make_step(0, 1, 64)
    (found,) = rank(logits, [step])
    assert len(found.tokens) == 9
    check(found, logits, step)


def test_impossible_pairs_are_no_candidates():
    logits = torch.zeros(3, 200)
    logits[0, :190] = -torch.inf
    logits[1] = torch.nan
    logits[2] = -torch.inf
    (found,) = rank(logits, [make_step(0, 3, 64)])
    assert found.parents.tolist() == [0] * 10 and found.tokens.tolist() == list(range(190, 200))
    every = every_pair(3, 200)
    (found,) = rank(logits, [make_step(0, 3, 64, allowed=every)])
    assert found.tokens.tolist() == list(range(190, 200))


def test_exhausted_trie_leaves_no_candidates():
    nothing = AllowedTokens.pack(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))
    ends_only = AllowedTokens.pack(np.zeros(2, dtype=np.int32), np.array((7, 8), dtype=np.int32))
    steps = [
        make_step(0, 2, 4, allowed=nothing),
        make_step(2, 1, 4, allowed=ends_only, bans_ends=True, stop_token_ids=(7, 8)),
        make_step(3, 2, 4),
    ]
    logits = random_logits(np.random.default_rng(3), 5, 50)
    found = rank(logits, steps)
    assert [len(candidates.tokens) for candidates in found] == [0, 0, 4]
    check(found[2], logits, steps[2])


def test_ids_outside_vocabulary_are_ignored():
    options: dict[str, Any] = {"logit_bias": {-1: 50.0, 50: 50.0}, "stop_token_ids": (99,), "bans_ends": True}
    step = make_step(0, 2, 4, **options)
    logits = random_logits(np.random.default_rng(4), 2, 50)
    (found,) = rank(logits, [step])
    check(found, logits, make_step(0, 2, 4, bans_ends=True))


def test_top_logprobs_after_each_beam():
    """Those of the model itself: no bias, no ban, no trie."""
    rng = np.random.default_rng(5)
    logits = random_logits(rng, 7, 300)
    banned: dict[str, Any] = {"logit_bias": {1: 100.0}, "bans_ends": True}
    steps = [
        make_step(0, 3, 6, top_logprobs=5, **banned),
        make_step(3, 2, 6, top_logprobs=0),
        make_step(5, 2, 6, top_logprobs=2, allowed=random_allowed(rng, 2, 300)),
    ]
    found = rank(logits, steps)
    assert found[1].top_ids is None and found[1].top_logprobs is None
    for candidates, search, k in ((found[0], steps[0], 5), (found[2], steps[2], 2)):
        step, _ = search
        expected = logits[step.start : step.stop].log_softmax(-1).topk(k)
        assert candidates.top_ids is not None and candidates.top_logprobs is not None
        assert np.array_equal(candidates.top_ids, expected.indices) and candidates.top_ids.dtype == np.int32
        np.testing.assert_allclose(candidates.top_logprobs, expected.values, atol=1e-5)
        check(candidates, logits, search)


@pytest.mark.parametrize("rows_at_once", [1, 3])
def test_row_slices_change_no_result(monkeypatch, rows_at_once):
    logits = random_logits(np.random.default_rng(6), 8, 400)
    step = make_step(0, 8, 16, top_logprobs=3)
    (whole,) = rank(logits, [step])
    monkeypatch.setitem(beam_candidates.SLICE_ELEMENTS, "cpu", 400 * rows_at_once)
    (sliced,) = rank(logits, [step])
    for name in ("parents", "tokens", "scores", "logprobs", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(whole, name), getattr(sliced, name))


def test_results_do_not_alias_the_logits():
    logits = random_logits(np.random.default_rng(7), 4, 200)
    (found,) = rank(logits, [make_step(0, 4, 8)])
    before = found.scores.copy(), found.tokens.copy()
    logits.zero_()
    assert np.array_equal(found.scores, before[0]) and np.array_equal(found.tokens, before[1])


def test_beam_candidates_equal_flat_top_k():
    """As transformers does it: one topk over all accumulated log-probabilities."""
    rng = np.random.default_rng(8)
    logits, scores = random_logits(rng, 32, 2000), rng.normal(size=32).astype(np.float32) - 9
    (found,) = rank(logits, [make_step(0, 32, 96, scores)])
    accumulated = logits.log_softmax(-1) + torch.from_numpy(scores)[:, None]
    expected = accumulated.view(-1).topk(96)
    assert (found.parents * 2000 + found.tokens).tolist() == expected.indices.tolist()
    np.testing.assert_allclose(found.scores, expected.values, atol=2e-6)


def random_search(rng: np.random.Generator, start: int, rows: int, vocab_size: int, share: float) -> Search:
    """Some beams of which may be allowed nothing."""
    chosen = (rng.random((rows, vocab_size)) < share) & (rng.random((rows, 1)) < 0.8)
    beams, tokens = (a.astype(np.int32) for a in chosen.nonzero())
    options: dict[str, Any] = {"logit_bias": {3: 6.0, 0: -100.0}} if rng.random() < 0.4 else {}
    scores, count = rng.normal(scale=2.0, size=rows) - 5, int(rng.choice([1, 8, 40, 5000]))
    bans = {"bans_ends": bool(rng.random() < 0.3), "stop_token_ids": (4, 6)}
    return make_step(start, rows, count, scores, allowed=AllowedTokens.pack(beams, tokens), **bans, **options)


@pytest.mark.parametrize("vocab_size", [33, 300])
@pytest.mark.parametrize("seed", range(6))
def test_dense_and_gathered_ranking_agree(monkeypatch, seed, vocab_size):
    """All pairs with the others at -inf, or the allowed ones gathered: the candidates are the same, and so are their
    scores but for rounding, as a bias is added before or after the log-softmax."""
    rng = np.random.default_rng([seed, vocab_size])
    searches, start = [], 0
    for share in (1.0, 0.9, 0.5, 0.5, 0.3, 0.05, 0.0):
        rows = int(rng.choice([1, 4, 6]))
        searches.append(random_search(rng, start, rows, vocab_size, share))
        start += rows
    logits = random_logits(rng, start, vocab_size)
    before = logits.clone()
    found = {}
    for name, share in (("as it is", beam_candidates.DENSE_SHARE), ("gathered", 2.0), ("dense", 0.0)):
        monkeypatch.setattr(beam_candidates, "DENSE_SHARE", share)
        found[name] = rank(logits, searches)
        assert torch.equal(logits, before)
        for search, candidates in zip(searches, found[name], strict=True):
            check(candidates, logits, search)
    for name in ("as it is", "dense"):
        for search, candidates, gathered in zip(searches, found[name], found["gathered"], strict=True):
            assert np.array_equal(candidates.parents, gathered.parents), (name, search)
            assert np.array_equal(candidates.tokens, gathered.tokens), (name, search)
            np.testing.assert_allclose(candidates.scores, gathered.scores, rtol=1e-6, atol=2e-6)
            assert np.array_equal(candidates.logprobs, gathered.logprobs)
