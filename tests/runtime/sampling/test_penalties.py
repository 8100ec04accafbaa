"""Slow twin: counts from all token ids, one token at a time."""

from __future__ import annotations

import copy

import numpy as np
import torch
from sampling_requests import make_request

from baton.runtime.sampling.penalties import Penalties, PendingTokens
from baton.scheduler.request import Request

VOCAB = 40


def slow_penalties(logits: torch.Tensor, request: Request) -> torch.Tensor:
    logits, sampling = logits.clone(), request.sampling
    output = request.output_ids.tolist()
    for token_id in set(request.token_ids.view().tolist()):
        value = logits[token_id]
        value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        count = output.count(token_id)
        value = value - sampling.frequency_penalty * count - sampling.presence_penalty * (count > 0)
        logits[token_id] = value
    return logits


def random_request(rng: np.random.Generator, row: int) -> Request:
    return make_request(
        prompt=rng.integers(0, VOCAB, rng.integers(1, 30)).tolist(),
        output=rng.integers(0, VOCAB, rng.integers(0, 30)).tolist(),
        row=row,
        repetition_penalty=float(rng.choice([1.0, 0.5, 1.3])),
        frequency_penalty=float(rng.choice([0.0, -0.7, 0.4])),
        presence_penalty=float(rng.choice([0.0, -0.2, 1.5])),
    )


def check(penalties: Penalties, requests: list[Request], rng: np.random.Generator) -> None:
    """Also with a token in flight for some requests: as if they had it already."""
    logits = torch.from_numpy(rng.normal(size=(len(requests) + 1, VOCAB)).astype(np.float32))
    logits[:, 5] = -float("inf")
    expected = torch.stack([logits[0], *(slow_penalties(logits[i], r) for i, r in enumerate(requests, start=1))])
    penalties.apply(logits, list(range(1, len(requests) + 1)), requests)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)

    late = np.flatnonzero(rng.random(len(requests)) < 0.6)
    tokens = rng.integers(0, VOCAB, len(late))
    ahead = [replace_tokens(request) for request in requests]
    for i, token_id in zip(late, tokens):
        ahead[i].token_ids.append(int(token_id))
    logits = torch.from_numpy(rng.normal(size=(len(requests), VOCAB)).astype(np.float32))
    expected = torch.stack([slow_penalties(logits[i], r) for i, r in enumerate(ahead)])
    order = rng.permutation(len(late))  # the device has them in an order of its own
    last_ids = np.full(len(requests), 3, dtype=np.int32)
    last_ids[late[order]] = -np.arange(len(late)) - 1
    pending = PendingTokens(last_ids, torch.from_numpy(np.append(tokens[order], 0)))
    penalties.apply(logits, list(range(len(requests))), requests, pending)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def replace_tokens(request: Request) -> Request:
    """A copy that can grow by itself."""
    twin = copy.copy(request)
    twin.token_ids = request.token_ids.share()
    return twin


def test_grows_with_the_output_through_a_changing_batch():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        penalties = Penalties(num_rows=6)
        requests = [random_request(rng, row) for row in range(6)]
        for _ in range(30):
            batch = [r for r in requests if rng.random() < 0.7]
            if batch:
                check(penalties, batch, rng)
            for request in batch:
                request.token_ids.append(int(rng.integers(0, VOCAB)))


def test_a_row_that_passed_to_another_request_is_counted_anew():
    rng = np.random.default_rng(0)
    penalties = Penalties(num_rows=2)
    first, second = random_request(rng, 0), random_request(rng, 0)
    for request in (first, second, first):
        check(penalties, [request], rng)


def test_a_retracted_request_keeps_its_counts_in_another_row():
    rng = np.random.default_rng(1)
    penalties = Penalties(num_rows=2)
    request = random_request(rng, 0)
    check(penalties, [request], rng)
    request.token_ids.append(3)
    assert request.kv is not None
    request.kv.row = 1
    check(penalties, [request], rng)


def test_many_distinct_tokens():
    penalties = Penalties(num_rows=1)
    request = make_request(prompt=[0], frequency_penalty=1.0)
    for token_id in [*range(2000), *range(1000)]:
        request.token_ids.append(token_id)
    logits = torch.zeros(1, 2000)
    penalties.apply(logits, [0], [request])
    assert logits[0, :1000].eq(-2).all() and logits[0, 1000:].eq(-1).all()


def test_nothing_seen_changes_nothing():
    logits = torch.ones(1, VOCAB)
    Penalties(num_rows=1).apply(logits, [0], [make_request(presence_penalty=1.0)])
    assert logits.eq(1).all()
