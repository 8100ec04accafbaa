"""Slow twin: one request at a time, full sorts, Python loops; only the noise is the sampler's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from baton.runtime.sampling.noise import draw_keys, exponential_noise
from baton.runtime.sampling.ops import NUCLEUS_WIDTH, TORCH_GPU_OPS, TORCH_OPS, SamplingOps
from baton.runtime.sampling.sampler import Sampler
from baton.scheduler.constraints.constraint import AllowedTokens
from tests.doubles.sampling_requests import KnownSequence, allow, make_known, positions_of

EOS = (2, 5)


def kept_tokens(logits: torch.Tensor, sequence: KnownSequence) -> dict[int, float]:
    """Token id -> unnormalised probability of what the filters leave."""
    sampling = sequence.sampling
    scaled = ((logits - logits.max()) / max(sampling.temperature, 1e-30)).tolist()
    ranking = sorted(range(len(scaled)), key=lambda i: (-logits[i].item(), i))
    weight = {i: math.exp(scaled[i]) for i in ranking}
    if sampling.top_k > 0:
        ranking = ranking[: sampling.top_k]
    total, cumulative, nucleus = sum(weight[i] for i in ranking), 0.0, []
    for token_id in ranking:
        if sampling.top_p < 1.0 and cumulative >= sampling.top_p * total and nucleus:
            break
        nucleus.append(token_id)
        cumulative += weight[token_id]
    floor = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    return {i: weight[i] for i in nucleus if scaled[i] >= floor or i == ranking[0]}


def slow_sample(logits: torch.Tensor, sequence: KnownSequence, allowed: np.ndarray | None = None) -> int:
    logits, sampling, output = logits.clone(), sequence.sampling, sequence.output
    if allowed is not None:
        logits[np.setdiff1d(np.arange(len(logits)), allowed)] = -math.inf
    for token_id, value in (sampling.logit_bias or {}).items():
        logits[token_id] += value
    if len(output) < sampling.min_new_tokens:
        logits[[*(EOS if sequence.state.info.eos_ends else ()), *sampling.stop_token_ids]] = -math.inf
    for token_id in {*sequence.prompt, *output}:
        value = logits[token_id]
        value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        value = value - float(np.float32(sampling.frequency_penalty) * output.count(token_id))
        logits[token_id] = value - float(np.float32(sampling.presence_penalty) * (token_id in output))
    if sampling.is_greedy:
        return int(logits.argmax())
    weights = kept_tokens(logits, sequence)
    keys = draw_keys(np.array([sequence.state.info.seed], dtype=np.uint64), np.array([len(output)]))
    noise = exponential_noise(torch.from_numpy(keys), torch.arange(len(logits), dtype=torch.int32))[0]
    return max(weights, key=lambda i: weights[i] / noise[i].item())


def random_sequence(rng: np.random.Generator, vocab_size: int, *, eos_ends: bool = True) -> KnownSequence:
    def tokens(most: int) -> list[int]:
        return rng.integers(0, vocab_size, rng.integers(0, most)).tolist()

    def pick(*values):
        return values[rng.integers(len(values))]

    return make_known(
        prompt=[1, *tokens(20)],
        output=tokens(12),
        seed=int(rng.integers(0, 2**63)),
        eos_ends=eos_ends,
        temperature=pick(0.0, 0.3, 1.0, 1.0, 3.0),
        top_k=pick(-1, -1, 1, 2, 7, 50, 5000),
        top_p=pick(1.0, 1.0, 0.95, 0.5, 1e-6),
        min_p=pick(0.0, 0.0, 0.05, 0.5, 1.0),
        repetition_penalty=pick(1.0, 1.0, 1.2, 0.7),
        frequency_penalty=pick(0.0, 0.0, 0.5, -0.5),
        presence_penalty=pick(0.0, 0.0, 1.0),
        min_new_tokens=pick(0, 0, 5),
        stop_token_ids=pick((), (7, 8)),
        logit_bias=pick(None, None, {3: 4.0, 9: -100.0}),
        max_new_tokens=1000,
    )


def random_logits(rng: np.random.Generator, n: int, vocab_size: int) -> torch.Tensor:
    """bf16 values of few levels: ties everywhere, also where the filters cut."""
    logits = torch.from_numpy(rng.normal(scale=rng.choice([0.3, 2.0, 6.0]), size=(n, vocab_size)).astype(np.float32))
    return logits.bfloat16().float()


def sampler(vocab_size: int, ops: SamplingOps = TORCH_OPS) -> Sampler:
    return Sampler(vocab_size, EOS, "cpu", ops)


def sample(
    fast: Sampler, logits: torch.Tensor, sequences: list[KnownSequence], allowed: AllowedTokens | None = None
) -> torch.Tensor:
    return fast.sample(logits, [s.state for s in sequences], positions_of(sequences), allowed).ids


@pytest.mark.parametrize("ops", [TORCH_OPS, TORCH_GPU_OPS], ids=["cpu", "gpu"])
@pytest.mark.parametrize("vocab_size", [40, 1000, 20_000])
@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_equal_the_slow_twin(seed, vocab_size, ops):
    rng = np.random.default_rng(seed)
    fast = sampler(vocab_size, ops=ops)
    sequences = [random_sequence(rng, vocab_size) for _ in range(24 if vocab_size < 20_000 else 8)]
    for _ in range(3 if vocab_size < 20_000 else 1):
        logits = random_logits(rng, len(sequences), vocab_size)
        before = logits.clone()
        ids = sample(fast, logits, sequences).tolist()
        assert ids == [slow_sample(row, sequence) for row, sequence in zip(logits, sequences)], f"seed {seed}"
        assert torch.equal(logits, before), "the raw logits are needed for the logprobs"
        for sequence, token_id in zip(sequences, ids):
            sequence.append(token_id)


@pytest.mark.parametrize(
    ("seed", "vocab_size"), [(0, 40), (0, 6000), *(pytest.param(seed, 40, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_triton_equals_its_slow_twin(interpreter, seed, vocab_size):
    """All kinds of rows in one batch, some with few allowed tokens; the kernels run in Triton's interpreter."""
    from baton.runtime.sampling import triton_ops as triton

    rng = np.random.default_rng(seed)
    ops = SamplingOps(triton.draw_top_k, triton.draw_all, triton.draw_nucleus, TORCH_OPS.row_statistics)
    sequences = [random_sequence(rng, vocab_size, eos_ends=bool(row % 3)) for row in range(24)]
    logits = random_logits(rng, len(sequences), vocab_size)
    allowed = {row: np.array([3, 9, 11, 30], dtype=np.int32) for row in range(0, 24, 3)}
    ids = sample(sampler(vocab_size, ops=ops), logits, sequences, allow(allowed)).tolist()
    assert ids == [slow_sample(logits[i], sequence, allowed.get(i)) for i, sequence in enumerate(sequences)], (
        f"seed {seed}"
    )
    for part in (slice(0, 7), slice(7, 8), slice(8, 24)):  # in any company
        some = {i: allowed[row] for i, row in enumerate(range(24)[part]) if row in allowed}
        assert sample(sampler(vocab_size, ops=ops), logits[part], sequences[part], allow(some)).tolist() == ids[part]


@pytest.mark.parametrize("vocab_size", [40, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_rows_with_allowed_tokens_equal_the_slow_twin(seed, vocab_size):
    """Each with its own few tokens or with many, beside rows that may say anything."""
    rng = np.random.default_rng(seed)
    fast = sampler(vocab_size)
    constrained = rng.choice(24, 16, replace=False).tolist()
    free_ends = {row: bool(rng.random() < 0.3) for row in constrained}  # what the constraint says of eos
    sequences = [random_sequence(rng, vocab_size, eos_ends=free_ends.get(row, True)) for row in range(24)]
    for _ in range(3):
        logits = random_logits(rng, len(sequences), vocab_size)
        before = logits.clone()
        allowed = {}
        for row in constrained:
            free = np.setdiff1d(np.arange(vocab_size), [*EOS, 7, 8])  # not only what min_new_tokens bans
            some = rng.choice(vocab_size, int(rng.choice([0, 2, vocab_size // 2])), replace=False)
            allowed[row] = np.union1d(some, rng.choice(free, 2)).astype(np.int32)
        ids = sample(fast, logits, sequences, allow(allowed)).tolist()
        assert ids == [slow_sample(logits[i], sequence, allowed.get(i)) for i, sequence in enumerate(sequences)]
        assert all(ids[row] in tokens for row, tokens in allowed.items()), f"seed {seed}"
        assert torch.equal(logits, before)
        for sequence, token_id in zip(sequences, ids):
            sequence.append(token_id)


@pytest.mark.parametrize("seed", range(8))
def test_sampling_is_batch_invariant(seed):
    """Alone, in shuffled parts, in slices of any size, with a fresh sampler or a used one."""
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.choice([30, 700, 2000]))
    sequences = [random_sequence(rng, vocab_size) for _ in range(30)]
    logits = random_logits(rng, 30, vocab_size)
    fast = sampler(vocab_size)
    together = sample(fast, logits, sequences)
    alone = torch.cat([sample(fast, logits[i : i + 1], [sequence]) for i, sequence in enumerate(sequences)])
    assert torch.equal(alone, together), f"seed {seed}"
    order = rng.permutation(30)
    for part in np.array_split(order, 3):
        fast._slice_elements = int(rng.integers(1, 10 * vocab_size))
        ids = sample(fast, logits[part], [sequences[i] for i in part])
        assert torch.equal(ids, together[part]), f"seed {seed}"


def test_seeds_and_positions_draw_independently():
    """A 3 × 3 table of (token at position 0, token at position 1), over 9000 seeds."""
    sequences = [make_known(seed=seed) for seed in range(9000)]
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(9000, 3).contiguous()
    fast = sampler(3)
    first = sample(fast, logits, sequences)
    for sequence, token_id in zip(sequences, first.tolist()):
        sequence.append(token_id)
    second = sample(fast, logits, sequences)
    probabilities = np.array([0.5, 0.3, 0.2])
    observed = np.bincount((3 * first + second).numpy(), minlength=9)
    assert chi_square(observed, np.outer(probabilities, probabilities).ravel()) < critical_value(8)


def chi_square(observed: np.ndarray, probabilities: np.ndarray) -> float:
    expected = observed.sum() * probabilities / probabilities.sum()
    return float(((observed - expected) ** 2 / expected).sum())


def critical_value(degrees: int) -> float:
    """Exceeded by chance once in 10,000 times (Wilson-Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 8},
        {"top_p": 0.8},
        {"top_k": 20, "top_p": 0.9, "temperature": 2.0},
        {"min_p": 0.1},
    ],
    ids=str,
)
def test_draws_follow_the_softmax_of_the_filtered_tokens(sampling):
    draws, vocab_size = 20_000, 30
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=vocab_size).astype(np.float32))
    sequences = [make_known(seed=seed, **sampling) for seed in range(draws)]
    ids = sample(sampler(vocab_size), logits.expand(draws, -1).contiguous(), sequences).numpy()
    weights = kept_tokens(logits, sequences[0])
    observed = np.bincount(ids, minlength=vocab_size)
    kept = sorted(weights)
    assert observed[kept].sum() == draws, "a token outside the filters was drawn"
    assert chi_square(observed[kept], np.array([weights[i] for i in kept])) < critical_value(len(kept) - 1)


def test_draws_of_one_seed_over_positions_follow_softmax():
    vocab_size = 12
    logits = torch.from_numpy(np.random.default_rng(4).normal(size=(1, vocab_size)).astype(np.float32))
    sequence, fast = make_known(seed=99), sampler(vocab_size)
    for _ in range(4000):
        sequence.append(int(sample(fast, logits, [sequence])))
    observed = np.bincount(sequence.output, minlength=vocab_size)
    assert chi_square(observed, logits[0].softmax(-1).numpy()) < critical_value(vocab_size - 1)


def test_nucleus_wider_than_first_look_equals_slow_twin():
    """Nearly flat logits: top_p needs more than NUCLEUS_WIDTH tokens in one row and not in the other."""
    rng = np.random.default_rng(5)
    vocab_size = 4 * NUCLEUS_WIDTH
    logits = random_logits(rng, 200, vocab_size) / 100
    logits[::2, :10] += 20
    sequences = [make_known(seed=i, top_p=0.9) for i in range(200)]
    ids = sample(sampler(vocab_size), logits, sequences).tolist()
    assert ids == [slow_sample(row, sequence) for row, sequence in zip(logits, sequences)]
    assert len(kept_tokens(logits[1], sequences[1])) > NUCLEUS_WIDTH > len(kept_tokens(logits[0], sequences[0]))


class TestGreedy:
    def test_ties_go_to_the_lowest_id(self):
        logits = torch.zeros(3, 100)
        logits[1, [40, 60]] = 5.0
        fast = sampler(100)
        greedy = [make_known(temperature=0.0) for _ in range(3)]
        assert sample(fast, logits, greedy).tolist() == [0, 40, 0]
        assert sample(fast, logits, [make_known(top_k=1), make_known(top_k=1), make_known()])[:2].tolist() == [
            0,
            40,
        ]

    @pytest.mark.parametrize(
        "sampling", [{"temperature": 1e-45}, {"temperature": 1e-300}, {"top_p": 1e-9}, {"min_p": 1.0}]
    )
    def test_extreme_sampling_params_are_greedy(self, sampling):
        logits = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 500)).astype(np.float32)) * 50
        sequences = [make_known(seed=i, **sampling) for i in range(20)]
        assert torch.equal(sample(sampler(500), logits, sequences), logits.argmax(-1))


class TestEdges:
    def test_min_new_tokens_counts_output_tokens(self):
        logits = torch.zeros(1, 10)
        logits[0, [2, 5, 7]] = 9.0
        sequence = make_known(temperature=0.0, min_new_tokens=2, stop_token_ids=(7,))
        fast, ids = sampler(10), []
        for _ in range(3):
            ids.append(int(sample(fast, logits, [sequence])))
            sequence.append(ids[-1])
        assert ids == [0, 0, 2]

    def test_ids_outside_vocabulary_are_ignored(self):
        sequence = make_known(
            temperature=0.0, min_new_tokens=1, stop_token_ids=(99, -3), logit_bias={-1: 100.0, 10: 100.0}
        )
        assert sample(sampler(10), torch.arange(10.0)[None], [sequence]).tolist() == [9]

    def test_logit_bias_forces_and_forbids(self):
        logits = torch.from_numpy(np.random.default_rng(1).normal(size=(50, 20)).astype(np.float32))
        force = [make_known(seed=i, logit_bias={11: 100.0}) for i in range(50)]
        assert sample(sampler(20), logits, force).eq(11).all()
        forbid = [make_known(seed=i, logit_bias={11: -100.0}) for i in range(50)]
        assert not sample(sampler(20), logits, forbid).eq(11).any()

    def test_extreme_logits_and_temperatures(self):
        logits = torch.tensor([[3e38, -3e38, 0.0], [-math.inf, -math.inf, 1.0], [0.0, 0.0, -math.inf]])
        sequences = [make_known(temperature=t, top_k=k) for t, k in ((1e-20, -1), (1e20, -1), (0.5, 3))]
        ids = sample(sampler(3), logits, sequences).tolist()
        assert ids[:2] == [0, 2] and ids[2] in (0, 1)

    def test_nan_row_yields_a_token_and_affects_no_other(self):
        logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(0))
        params: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9})
        expected = sample(sampler(600), logits[:1].expand(4, -1), [make_known(**p) for p in params])
        for broken, p in enumerate(params):
            sequences = [make_known(**q) for q in params] + [make_known(**p)]
            rows = torch.cat([logits[:1].expand(4, -1), torch.full((1, 600), math.nan)])
            ids = sample(sampler(600), rows, sequences)
            assert torch.equal(ids[:4], expected) and 0 <= ids[4] < 600, broken

    @pytest.mark.parametrize(
        "sampling", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.2}, {"temperature": 1e20}]
    )
    @pytest.mark.parametrize("broken", [math.nan, -math.inf, math.inf])
    def test_non_finite_row_yields_an_allowed_token(self, sampling, broken):
        logits = torch.full((1, 600), broken)
        sequence = make_known(
            repetition_penalty=1.5, prompt=[300, 301], logit_bias={300: -100.0}, eos_ends=False, **sampling
        )
        allowed = np.array([300, 301, 599], dtype=np.int32)
        assert int(sample(sampler(600), logits, [sequence], allow({0: allowed}))) in (300, 301, 599)

    def test_min_new_tokens_yields_if_only_ends_are_allowed(self):
        """An item that holds a stop id, which does not end the sequence yet. An eos id in an item ends nothing."""
        logits = torch.zeros(1, 10)
        logits[0, 8] = 9.0
        sequence = make_known(temperature=0.0, min_new_tokens=2, stop_token_ids=(7,), eos_ends=False)
        fast = sampler(10)
        assert int(sample(fast, logits, [sequence], allow({0: np.array([7], dtype=np.int32)}))) == 7
        assert int(sample(fast, logits, [sequence], allow({0: np.array([7, 9], dtype=np.int32)}))) == 9
        assert int(sample(fast, logits, [sequence], allow({0: np.array([5, 9], dtype=np.int32)}))) == 5

    def test_tokens_in_flight_advance_the_draw_position(self):
        """A step that is sampled while the one before is in flight draws at the next position."""
        logits = torch.zeros(1, 5000)
        sequence, fast = make_known(seed=1), sampler(5000)
        ahead = fast.sample(logits, [sequence.state], np.array([1])).ids
        now = fast.sample(logits, [sequence.state], np.array([0])).ids
        sequence.append(int(now))
        assert torch.equal(sample(fast, logits, [sequence]), ahead) and not torch.equal(now, ahead)

    def test_sampling_plan_follows_the_batch(self):
        logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
        fast = sampler(3)
        a, b = make_known(temperature=0.0), make_known(temperature=0.0, logit_bias={0: -50.0})
        assert sample(fast, logits, [a, b]).tolist() == [2, 1]
        assert sample(fast, logits, [b, a]).tolist() == [2, 0]
        assert sample(fast, logits[:1], [a]).tolist() == [2]
