"""No token outside what a request allows gets past the step runner, whatever the logits and the kernels are."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from baton.runtime.sampling.ops import TORCH_OPS
from baton.runtime.sampling.sampler import Sampler
from baton.runtime.sampling.token_masks import forbidden_rows, is_forbidden
from baton.scheduler.batch import BeamCandidates
from baton.scheduler.constraints.constraint import AllowedTokens
from baton.scheduler.sampling_params import MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_REPETITION_PENALTY
from tests.doubles.kv_echo import VOCAB as ECHO_VOCAB
from tests.doubles.logit_tables import (
    VOCAB_SIZE,
    greedy,
    make_batch,
    make_search,
    make_step,
    make_step_runner,
    random_logits,
)
from tests.doubles.sampling_requests import allow, make_info, make_sequence

SEED = int(os.environ.get("BATON_NUMBERS_SEED", "31"))
VOCAB = 300
LARGEST = float(np.finfo(np.float32).max)
LOGITS = [0.0, -0.0, 1.0, -50.0, 1e-45, -1e-38, 65504.0, 1e30, -1e30, LARGEST, -LARGEST, -np.inf]
NUMBERS: dict[str, list[float]] = {
    "temperature": [0.0, 5e-324, 1e-45, 1e-7, 1e-6, 0.7, 1.0, 65504.0, 65536.0, 1e29, MAX_TEMPERATURE],
    "top_p": [5e-324, 1e-45, 1e-9, 0.5, 1 - 2**-53, 1 - 2**-24, 1.0],
    "top_k": [-1, 1, 2, 4096, 4097, 2**31 - 1, 2**31, 2**63 - 1],
    "min_p": [0.0, -0.0, 5e-324, 1e-45, 0.5, 1 - 2**-53, 1.0],
    "frequency_penalty": [0.0, -0.0, 5e-324, -1e-45, 2.0, -2.0],
    "presence_penalty": [0.0, -0.0, 5e-324, -1e-45, 2.0, -2.0],
    "repetition_penalty": [MIN_REPETITION_PENALTY, 1 - 2**-53, 1.0, 1 + 2**-23, 2.0, MAX_REPETITION_PENALTY],
    "min_new_tokens": [0, 3],
}


def draw_request(rng: random.Random) -> dict[str, Any]:
    request: dict[str, Any] = {name: rng.choice(values) for name, values in NUMBERS.items() if rng.random() < 0.6}
    if rng.random() < 0.5:
        values = [100.0, -100.0, 5e-324, -0.0]
        request["logit_bias"] = {rng.randrange(VOCAB): rng.choice(values) for _ in range(5)}
    return request


def draw_logits(rng: random.Random, rows: int) -> torch.Tensor:
    choice = np.random.default_rng(rng.randrange(2**32))
    table = np.array(rng.sample(LOGITS, rng.randint(1, len(LOGITS))), dtype=np.float32)
    logits = choice.choice(table, (rows, VOCAB))
    if rng.random() < 0.5:
        logits = np.where(choice.random((rows, VOCAB)) < 0.5, choice.normal(0, 10, (rows, VOCAB)), logits)
    return torch.tensor(logits, dtype=torch.float32)


@pytest.mark.parametrize("block", range(4))
def test_constrained_rows_get_allowed_tokens_for_any_logits(block: int) -> None:
    """Each batch mixes rows of all kinds, with and without a constraint, drawn from one seed."""
    print(f"BATON_NUMBERS_SEED={SEED}")
    rng = random.Random(SEED + block)
    sampler = Sampler(VOCAB, (2,), "cpu")
    constrained = 0
    for _ in range(60):
        rows = rng.randint(1, 8)
        logits = draw_logits(rng, rows)
        wishes = [draw_request(rng) for _ in range(rows)]
        said = [[rng.randrange(VOCAB) for _ in range(rng.choice([0, 40]))] for _ in range(rows)]
        sequences = [
            make_sequence(seed=rng.randrange(2**63), output=output, prompt=list(range(VOCAB)), **wish)
            for wish, output in zip(wishes, said)
        ]
        masks = {row: rng.sample(range(VOCAB), rng.choice([1, 2, 40])) for row in range(rows) if rng.random() < 0.6}
        positions = np.array([rng.choice([0, 1, 5]) for _ in range(rows)], dtype=np.int32)
        allowed = allow(masks) if masks else None
        sampled = sampler.sample(logits, sequences, positions, allowed)
        ids = sampled.ids.tolist()
        for row, mask in masks.items():
            assert ids[row] in mask, (wishes[row], logits[row])
            banned = positions[row] < wishes[row].get("min_new_tokens", 0)
            assert not (banned and ids[row] == 2) or set(mask) == {2}, wishes[row]
        constrained += len(masks)
        batch = make_batch([greedy()] * rows, allowed=allowed)
        chosen = sampled.chosen.numpy() if sampled.chosen is not None else None
        wrong = forbidden_rows(
            batch, np.ones(rows, dtype=np.int32), sampled.ids.numpy(), np.arange(rows), chosen, VOCAB
        )
        finite = logits.isfinite().all(dim=1).tolist()
        assert all(row not in masks and not finite[row] for row in wrong), "only where nothing was left to choose"
    assert constrained > 100


def broken(**wrong: int) -> Sampler:
    """A sampler on kernels that draw these tokens, whatever they are given."""

    def draws(token: int):
        return lambda logits, *_: torch.full((len(logits),), token, dtype=torch.int64)

    return Sampler(VOCAB_SIZE, (2,), "cpu", replace(TORCH_OPS, **{op: draws(token) for op, token in wrong.items()}))


@pytest.mark.parametrize("token", [9, -1, VOCAB_SIZE, 2**40])
@pytest.mark.parametrize(
    ("op", "wish"), [("draw_all", {}), ("draw_top_k", {"top_k": 5}), ("draw_nucleus", {"top_p": 0.5})]
)
def test_draw_outside_mask_fails_only_its_row(op: str, wish: dict[str, Any], token: int) -> None:
    logits = random_logits(3)
    step_runner = make_step_runner(logits)
    step_runner._sampler = broken(**{op: token})
    infos = [greedy(), make_info(serial=10_001, **wish), greedy()]
    result = step_runner.run(make_batch(infos, allowed=allow({1: [5, 7]}))).result
    assert result.forbidden_rows == (1,) and not result.failed_rows
    rows = result.rows()
    assert (rows[0], rows[2]) == ([int(logits[0].argmax())], [int(logits[2].argmax())])


def test_draw_outside_vocabulary_fails_unconstrained_row() -> None:
    step_runner = make_step_runner(random_logits(2))
    step_runner._sampler = broken(draw_all=VOCAB_SIZE)
    result = step_runner.run(make_batch([greedy(), make_info(serial=10_002)])).result
    assert result.forbidden_rows == (1,)


def test_banned_token_and_early_end_are_detected() -> None:
    infos = [
        make_info(serial=10_003, banned=[(9,)]),
        make_info(serial=10_004, min_new_tokens=2, stop_token_ids=(9,)),
        make_info(serial=10_005, logit_bias={3: 1.0}),
    ]
    step_runner = make_step_runner(random_logits(3))
    step_runner._sampler = broken(draw_all=9)
    assert step_runner.run(make_batch(infos)).result.forbidden_rows == (0, 1)


def test_forbidden_rows_of_ragged_results() -> None:
    places = {2: [5], 3: [6], 5: [7], 7: [7]}  # the second row had a guess that was wrong, and another one behind it
    batch = make_batch([greedy()] * 4, allowed=allow(places))
    counts = np.array([0, 2, 1, 3], dtype=np.int32)

    def found(*tokens: int, chosen: np.ndarray | None = None) -> list[int]:
        return forbidden_rows(batch, counts, np.array(tokens), np.array([2, 3, 4, 5, 6, 7]), chosen, ECHO_VOCAB)

    assert found(5, 6, 99, 7, 7, 7) == []
    assert found(5, 6, 99, 7, 8, 7) == [], "no constraint applies to the last row's second sample"
    assert found(6, 6, 99, 7, 7, 7) == found(5, 5, 99, 7, 7, 7) == [1]
    assert found(5, 6, ECHO_VOCAB, 7, 7, 8) == [2, 3]
    chosen = np.zeros(6, dtype=np.float32)
    chosen[[2, 3]] = np.nan, -np.inf
    assert found(5, 6, 99, 7, 7, 7, chosen=chosen) == [2, 3]
    nothing = np.empty(0, dtype=np.int64)
    assert forbidden_rows(batch, np.zeros(4, dtype=np.int32), nothing, nothing, None, ECHO_VOCAB) == []


def test_holds_equals_set_membership() -> None:
    rng = np.random.default_rng(SEED)
    pairs = {(int(row), int(token)) for row, token in zip(rng.integers(0, 5, 200), rng.integers(0, 200, 200))}
    rows, tokens = np.array(sorted(pairs), dtype=np.int32).T
    packed = AllowedTokens.pack(rows, tokens)
    every = [(row, token) for row in range(6) for token in (*range(-40, 240), 2**31 - 1, 2**36 + 5, -(2**40))]
    asked = np.array(every, dtype=np.int64)
    assert packed.holds(asked[:, 0], asked[:, 1]).tolist() == [pair in pairs for pair in every]
    nothing = AllowedTokens.pack(rows[:0], tokens[:0])
    assert nothing.holds(asked[:, 0], asked[:, 1]).sum() == 0


def test_forbidden_candidates_of_a_search() -> None:
    search = make_search(2)
    step = replace(make_step(search, 0, 2, 2), allowed=allow({0: [5, 6], 1: [7]}))

    def candidates(parents: list[int], tokens: list[int]) -> BeamCandidates:
        nothing = np.zeros(len(tokens), dtype=np.float32)
        return BeamCandidates(np.array(parents, dtype=np.int32), np.array(tokens, dtype=np.int32), nothing, nothing)

    assert not is_forbidden(step, candidates([0, 1], [6, 7]), VOCAB_SIZE)
    assert not is_forbidden(step, candidates([], []), VOCAB_SIZE)
    assert is_forbidden(step, candidates([0, 1], [6, 6]), VOCAB_SIZE)
    free = make_step(search, 0, 2, 2)
    assert not is_forbidden(free, candidates([0, 1], [6, 6]), VOCAB_SIZE)
    assert is_forbidden(free, candidates([0, 1], [6, VOCAB_SIZE]), VOCAB_SIZE)
