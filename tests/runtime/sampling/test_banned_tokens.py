"""Slow twin: looks at all tokens of an output, for every banned sequence, one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.runtime.sampling.penalties import PendingTokens
from baton.runtime.sampling.sampler import Sampler
from baton.runtime.sampling.sequences import SequenceTable
from tests.doubles.sampling_requests import KnownSequence, make_known, make_sequence, positions_of

VOCAB, EOS = 12, (0,)
CPU = torch.device("cpu")


def slow_bans(output: list[int], banned: tuple[tuple[int, ...], ...]) -> set[int]:
    """What must not come next."""
    return {s[-1] for s in banned if len(s) == 1 or tuple(output[1 - len(s) :]) == s[:-1]}


def random_bans(rng: np.random.Generator) -> list[list[int]]:
    """Bans of few ids, so that outputs often contain their beginnings. Some end in the same token, and some are the end
    of others."""
    made = [rng.integers(1, 4, rng.choice([1, 2, 2, 3, 3, 4, 6])).tolist() for _ in range(rng.integers(0, 7))]
    return made + [ids[1:] for ids in made if len(ids) > 2 and rng.random() < 0.5]


def adjusted(
    sampler: Sampler, logits: torch.Tensor, sequences: list[KnownSequence], pending: PendingTokens | None = None
) -> torch.Tensor:
    plan = sampler._plan_for([sequence.state for sequence in sequences])
    return sampler._adjust(logits, plan, positions_of(sequences), None, pending)


def expected_of(logits: torch.Tensor, sequences: list[KnownSequence]) -> torch.Tensor:
    expected = logits.clone()
    for row, sequence in enumerate(sequences):
        for token_id, value in (sequence.sampling.logit_bias or {}).items():
            expected[row, token_id] += value
        for token_id in slow_bans(sequence.output, sequence.state.info.banned):
            expected[row, token_id] = -float("inf")
    return expected


@pytest.mark.parametrize("seed", range(12))
def test_bans_follow_growing_outputs_and_changing_batches(seed: int) -> None:
    """Also with the newest token of some rows in flight: known to the device alone, in an order of its own."""
    rng = np.random.default_rng(seed)
    sampler = Sampler(VOCAB, EOS, CPU)
    sequences = [
        make_known(banned=random_bans(rng), logit_bias={2: 1.5} if i % 3 == 0 else None, serial=i) for i in range(7)
    ]
    batch, hits = sequences, 0
    for step in range(40):
        if step % 5 == 0:  # in between the plan stays
            batch = [sequence for sequence in sequences if rng.random() < 0.8] or sequences
        logits = torch.from_numpy(rng.normal(size=(len(batch), VOCAB)).astype(np.float32))
        expected = expected_of(logits, batch)
        hits += int(expected.isinf().sum())
        torch.testing.assert_close(adjusted(sampler, logits, batch), expected, rtol=0, atol=0)

        late = np.flatnonzero(rng.random(len(batch)) < 0.6)
        tokens = rng.integers(1, 4, len(batch))
        ahead = [sequence.copy() if row in late else sequence for row, sequence in enumerate(batch)]
        for row in late:
            ahead[row].append(int(tokens[row]))
        order = rng.permutation(len(late))
        last_ids = np.full(len(batch), 3, dtype=np.int32)
        last_ids[late[order]] = -np.arange(len(late)) - 1
        pending = PendingTokens(last_ids, torch.from_numpy(np.append(tokens[late[order]], 0)))
        torch.testing.assert_close(
            adjusted(sampler, logits, batch, pending), expected_of(logits, ahead), rtol=0, atol=0
        )
        for sequence in batch:
            sequence.append(int(rng.integers(1, 4)))
    assert hits > 50, "the test needs bans"


def test_bans_look_at_output_tokens_not_the_prompt() -> None:
    sampler, logits = Sampler(VOCAB, EOS, CPU), torch.zeros(1, VOCAB)
    one = make_known(prompt=[5, 6], banned=[[5, 7], [6, 8], [5, 6, 9]])
    assert torch.equal(adjusted(sampler, logits, [one]), logits)
    pending = PendingTokens(np.array([-2], dtype=np.int32), torch.tensor([0, 6]))
    assert adjusted(sampler, logits, [one], pending).isinf().nonzero().tolist() == [[0, 8]]


def test_one_sequence_bans_a_token_that_another_allows() -> None:
    """Both end in the same token; which of them is written last must not matter."""
    for banned in ([[1, 5], [2, 5]], [[2, 5], [1, 5]], [[1, 5], [3, 2, 5]], [[3, 2, 5], [4, 2, 5], [3, 1, 5]]):
        for output in ([3, 1], [3, 2]):
            known = make_known(banned=banned, output=output)
            found = adjusted(Sampler(VOCAB, EOS, CPU), torch.zeros(1, VOCAB), [known])
            bans = slow_bans(output, known.state.info.banned)
            assert found.isinf().nonzero().tolist() == [[0, token_id] for token_id in bans]


@pytest.mark.parametrize("wish", [{"temperature": 0.0}, {"temperature": 3.0}, {"top_k": 3}, {"top_p": 0.9}])
def test_no_draw_gives_a_banned_token(wish: dict) -> None:
    banned, sampler = ((3,), (2, 2), (2, 1, 2), (1, 1, 1)), Sampler(VOCAB, EOS, CPU)
    known = make_known(banned=banned, seed=4, **wish)
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, 1:4] = torch.tensor([2.0, 2.5, 9.0])
    logits[0, 4] = 0.0
    for _ in range(60):
        token_id = int(sampler.sample(logits, [known.state], positions_of([known])).ids[0])
        assert token_id not in slow_bans(known.output, banned)
        known.append(token_id)
    assert {1, 2} <= set(known.output)


def test_penalties_and_min_new_tokens_keep_bans() -> None:
    wish = {"repetition_penalty": 0.5, "frequency_penalty": -2.0, "min_new_tokens": 9, "logit_bias": {3: 100.0}}
    known = make_known(banned=[[3], [1, 2]], output=[2, 3, 1], stop_token_ids=(4,), **wish)
    found = adjusted(Sampler(VOCAB, EOS, CPU), torch.randn(1, VOCAB), [known])
    assert found.isinf().nonzero().tolist() == [[0, 0], [0, 2], [0, 3], [0, 4]] and not found.isnan().any()


def test_output_is_recorded_only_for_multi_token_bans() -> None:
    table = SequenceTable()
    plain, single, pair = (make_sequence(serial=i, banned=ids).info for i, ids in enumerate(([], [[5]], [[5, 6]])))
    table.update_sequences([plain, single, pair], [])
    assert list(table.recording) == [2] and table[0].banned is None
    state = table[2].banned
    assert state is not None
    for token_id in range(1000):
        state.append(token_id)
    assert len(state._tail) == 1


def test_batch_without_bans_does_not_copy_logits() -> None:
    """The logits come back as they are, not a copy of them; single tokens are part of the biases."""
    sampler, logits = Sampler(VOCAB, EOS, CPU), torch.randn(2, VOCAB)
    plain = [make_known(temperature=0.0), make_known(temperature=0.7)]
    assert adjusted(sampler, logits, plain) is logits
    single = [make_known(banned=[[5], [6]]), make_known()]
    plan = sampler._plan_for([sequence.state for sequence in single])
    assert plan.bans is None and plan.bias is not None and plan.bias[1].tolist() == [5, 6]
