"""Steps in which some rows verify guesses. The model is a table of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from baton.runtime.runner.model_runner import ForwardOutput
from baton.runtime.step_runner import StepRunner
from baton.scheduler.batch import (
    BeamStep,
    ScheduleBatch,
    SequenceInfo,
    StopMatch,
)
from baton.scheduler.request_spec import LogprobOptions
from tests.doubles.logit_tables import (
    BACKEND,
    EOS,
    SERIALS,
    VOCAB_SIZE,
    assert_ranked,
    greedy,
    make_batch,
    make_search,
    make_step,
    make_step_runner,
    random_logits,
)
from tests.doubles.sampling_requests import allow, make_info


class TestGuesses:
    """Rows whose last new tokens are guesses: (info, guesses, the logits' rows that say what follows)."""

    @staticmethod
    def step(
        rows: list[tuple[SequenceInfo, list[int], torch.Tensor]], samples: list[bool] | None = None, **options: Any
    ) -> tuple[StepRunner, ScheduleBatch]:
        """Each row computes one known token, and then its guesses."""
        samples = samples or [True] * len(rows)
        logits = torch.cat([said for (_, _, said), sampled in zip(rows, samples) if sampled])
        batch = make_batch([info for info, _, _ in rows], samples, **options)
        batch.draft_lens = np.array([len(guesses) for _, guesses, _ in rows], dtype=np.int32)
        batch.extend_lens = 1 + batch.draft_lens
        batch.input_ids = np.array([i for _, guesses, _ in rows for i in (7, *guesses)], dtype=np.int32)
        step_runner = make_step_runner(logits)
        step_runner._runner.forward = lambda *_: ForwardOutput(logits, None)  # type: ignore[method-assign]
        return step_runner, batch

    def test_guesses_among_other_rows(self) -> None:
        """One that does not sample, one without guesses, a search, a constraint; each gets what is its own."""
        logits = random_logits(4)
        best = logits.argmax(-1).tolist()
        search = make_search(2)
        wrong = (best[1] + 1) % VOCAB_SIZE
        rows = [
            (greedy(), [best[0], wrong], logits[:3]),
            (greedy(), [], logits[:1]),
            (greedy(), [], logits[3:]),
            (greedy(), [], logits[2:3]),
            (greedy(), best[:3], logits),
            *((search, [], logits[i : i + 1]) for i in (0, 1)),
        ]
        step = make_step(search, 5, 7, 4)
        options = {"beams": [step], "allowed": allow({4: [5, 9]})}
        step_runner, batch = self.step(rows, [True, False, True, True, True, True, True], **options)
        result = step_runner.run(batch).result
        allowed = 5 if logits[2, 5] > logits[2, 9] else 9
        assert result.rows() == [best[:2], [], [best[3]], [allowed], best, [], []]
        assert result.counts.tolist() == [2, 0, 1, 1, 4, 0, 0]
        beam_step = BeamStep(search.serial, 0, 2, 4, step.scores)
        assert_ranked(result.beams[0], logits[:2], beam_step, search)

    @pytest.mark.parametrize(
        "options", [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.01}, {"logit_bias": {5: 3.0}}], ids=str
    )
    def test_each_guess_position_is_sampled_with_its_own_noise(self, options: dict[str, Any]) -> None:
        """A step for each token says the same."""
        logits, said = random_logits(6), []
        info = make_info(temperature=1.5, seed=3, serial=next(SERIALS), **options)
        for position in range(6):
            batch = make_batch([info], output_positions=np.array([9 + position], dtype=np.int32))
            said += make_step_runner(logits[position : position + 1]).run(batch).result.rows()[0]
        assert len(set(said)) > 3
        step_runner, batch = self.step([(info, said[:5], logits)], output_positions=np.array([9], dtype=np.int32))
        assert step_runner.run(batch).result.rows() == [said]

    def test_min_new_tokens_applies_at_each_guess_position(self) -> None:
        logits = torch.full((4, VOCAB_SIZE), -5.0)
        logits[:, EOS[0]], logits[:, 9] = 5.0, 4.0
        info = greedy(min_new_tokens=2)
        step_runner, batch = self.step([(info, [9, 9, 9], logits)])
        assert step_runner.run(batch).result.rows() == [[9, 9, EOS[0]]]

    def test_logprobs_of_accepted_tokens(self) -> None:
        logits = random_logits(5)
        best = logits.argmax(-1).tolist()
        wanted, named = LogprobOptions(top_k=2), LogprobOptions(top_k=1, token_ids=(4, 5, 6))
        rows = [
            (greedy(logprobs=wanted), [best[0], 3, 3, 3], logits),
            (greedy(), [best[0]], logits[:2]),
            (greedy(logprobs=named), [best[2], best[3]], logits[2:]),
        ]
        step_runner, batch = self.step(rows)
        output = step_runner.run(batch)
        assert output.result.rows() == [best[:2], best[:2], best[2:]]
        expected = logits.log_softmax(-1)
        assert list(output.output_logprobs) == [0, 2]
        for row, places, k in ((0, [0, 1], 2), (2, [2, 3, 4], 1)):
            found = output.output_logprobs[row]
            assert found.ids.tolist() == [best[place] for place in places]
            np.testing.assert_allclose(found.values, expected[places].max(-1).values, atol=1e-5)
            assert np.array_equal(found.top_ids, expected[places].topk(k).indices)
        found = output.output_logprobs[2].named_values
        assert found is not None
        np.testing.assert_allclose(found, expected[2:, 4:7], atol=1e-5)

    def test_stop_string_completed_by_accepted_guess(self) -> None:
        vocab = BACKEND.get_vocab()
        the, he, space = vocab["the"], vocab["he"], vocab["Ġ"]
        logits = torch.full((4, VOCAB_SIZE), -50.0)
        for place, token in enumerate((space, the, he, he)):
            logits[place, token] = 5.0
        step_runner, batch = self.step([(greedy(stop=("he",)), [space, the, he], logits)])
        result = step_runner.run(batch).result
        assert result.rows() == [[space, the, he, he]]
        assert result.stop_matches == {0: StopMatch(0, 1, "t", token=1)}

    def test_non_finite_logits_after_wrong_guess_are_ignored(self) -> None:
        logits = random_logits(4)
        best = logits.argmax(-1).tolist()
        logits[3] = torch.nan
        right, wrong = (greedy(), best[:3], logits), (greedy(), [best[0], 3, 3], logits)
        step_runner, batch = self.step([wrong, right])
        result = step_runner.run(batch).result
        assert result.failed_rows == {1: 0} and result.rows()[0] == best[:2]

    @pytest.mark.parametrize(("first_spoiled", "sound"), [(1, 1), (2, 0), (3, 0)])
    def test_non_finite_kv_of_guesses_does_not_locate_bad_token(self, first_spoiled, sound) -> None:
        """The row is one token and three guesses behind another one."""
        logits = random_logits(4)
        logits[0] = torch.nan
        step_runner, batch = self.step([(greedy(), [3, 3, 3], logits)])
        step_runner._runner.sound = {0: first_spoiled}  # type: ignore[attr-defined]
        assert step_runner.run(batch).result.failed_rows == {0: sound}
