"""Slow twin: counts from all token ids, one token at a time."""

from __future__ import annotations

import numpy as np
import torch

from baton.runtime.sampling.penalties import PendingTokens, SeenTokens, apply_penalties
from tests.doubles.sampling_requests import KnownSequence, make_known

VOCAB = 40


def slow_penalties(logits: torch.Tensor, sequence: KnownSequence) -> torch.Tensor:
    logits, sampling = logits.clone(), sequence.sampling
    for token_id in {*sequence.prompt, *sequence.output}:
        value = logits[token_id]
        value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        count = sequence.output.count(token_id)
        value = value - sampling.frequency_penalty * count - sampling.presence_penalty * (count > 0)
        logits[token_id] = value
    return logits


def apply(
    logits: torch.Tensor, rows: list[int], sequences: list[KnownSequence], pending: PendingTokens | None = None
) -> None:
    apply_penalties(logits, rows, [seen_by(s) for s in sequences], [s.sampling for s in sequences], pending)


def seen_by(sequence: KnownSequence) -> SeenTokens:
    return sequence.state.seen if sequence.state.seen is not None else SeenTokens(np.empty(0, dtype=np.int32))


def random_sequence(rng: np.random.Generator) -> KnownSequence:
    return make_known(
        prompt=rng.integers(0, VOCAB, rng.integers(1, 30)).tolist(),
        output=rng.integers(0, VOCAB, rng.integers(0, 30)).tolist(),
        repetition_penalty=float(rng.choice([1.0, 0.5, 1.3])),
        frequency_penalty=float(rng.choice([0.0, -0.7, 0.4])),
        presence_penalty=float(rng.choice([0.0, -0.2, 1.5])),
    )


def check(sequences: list[KnownSequence], rng: np.random.Generator) -> None:
    """Also with a token in flight for some sequences: as if they had it already."""
    logits = torch.from_numpy(rng.normal(size=(len(sequences) + 1, VOCAB)).astype(np.float32))
    logits[:, 5] = -float("inf")
    expected = torch.stack([logits[0], *(slow_penalties(logits[i], s) for i, s in enumerate(sequences, start=1))])
    apply(logits, list(range(1, len(sequences) + 1)), sequences)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)

    late = np.flatnonzero(rng.random(len(sequences)) < 0.6)
    tokens = rng.integers(0, VOCAB, len(late))
    ahead = [sequence.copy() for sequence in sequences]
    for i, token_id in zip(late, tokens):
        ahead[i].append(int(token_id))
    logits = torch.from_numpy(rng.normal(size=(len(sequences), VOCAB)).astype(np.float32))
    expected = torch.stack([slow_penalties(logits[i], s) for i, s in enumerate(ahead)])
    order = rng.permutation(len(late))  # the device has them in an order of its own
    last_ids = np.full(len(sequences), 3, dtype=np.int32)
    last_ids[late[order]] = -np.arange(len(late)) - 1
    pending = PendingTokens(last_ids, torch.from_numpy(np.append(tokens[order], 0)))
    apply(logits, list(range(len(sequences))), sequences, pending)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def test_penalties_follow_output_in_changing_batches():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        sequences = [random_sequence(rng) for _ in range(6)]
        for _ in range(30):
            batch = [s for s in sequences if rng.random() < 0.7]
            if batch:
                check(batch, rng)
            for sequence in batch:
                sequence.append(int(rng.integers(0, VOCAB)))


def test_sequences_alternating_in_one_row_do_not_mix():
    rng = np.random.default_rng(0)
    first, second = random_sequence(rng), random_sequence(rng)
    for sequence in (first, second, first):
        check([sequence], rng)
        sequence.append(3)


def test_counts_follow_sequence_to_another_row():
    rng = np.random.default_rng(1)
    sequence, other = random_sequence(rng), random_sequence(rng)
    check([sequence], rng)
    sequence.append(3)
    check([other, sequence], rng)


def test_penalties_with_many_distinct_tokens():
    sequence = make_known(prompt=[0], frequency_penalty=1.0)
    for token_id in [*range(2000), *range(1000)]:
        sequence.append(token_id)
    logits = torch.zeros(1, 2000)
    apply(logits, [0], [sequence])
    assert logits[0, :1000].eq(-2).all() and logits[0, 1000:].eq(-1).all()


def test_penalties_without_seen_tokens_change_nothing():
    logits = torch.ones(1, VOCAB)
    apply(logits, [0], [make_known(presence_penalty=1.0)])
    assert logits.eq(1).all()
