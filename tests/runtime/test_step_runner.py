"""Steps of ordinary rows, beams and rows that ask for nothing, mixed. The model is a table of logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from baton.runtime.runner.model_runner import ForwardOutput
from baton.scheduler.batch import (
    StateRows,
    StepResult,
    StopMatch,
)
from baton.scheduler.beam.search import BeamGroup
from baton.scheduler.request_spec import LogprobOptions
from tests.doubles.logit_tables import (
    BACKEND,
    SERIALS,
    VOCAB_SIZE,
    Table,
    assert_ranked,
    greedy,
    make_batch,
    make_search,
    make_step,
    make_step_runner,
    random_logits,
)
from tests.doubles.sampling_requests import allow, make_info


def test_beams_between_ordinary_rows():
    """Rows that do not sample have no logits, so that the logits' rows are not the batch's."""
    logits = random_logits(10)
    first, second, idle = make_search(3), make_search(2), make_search(4)
    steps = [make_step(first, 2, 5, 6), make_step(idle, 5, 7, 0), make_step(second, 8, 10, 4)]
    infos = [greedy(), greedy(), first, first, first, idle, idle, greedy(), second, second]
    samples = [True, False, True, True, True, False, False, True, True, True]
    result = make_step_runner(logits).run(make_batch(infos, samples, beams=steps)).result
    best = logits.argmax(-1).tolist()
    assert result.rows() == [[best[0]], [], [], [], [], [], [], [best[7]], [], []]
    assert len(result.beams) == 3 and result.beams[1] is None
    assert_ranked(result.beams[0], logits, steps[0], first)
    assert_ranked(result.beams[2], logits, steps[2], second)


def test_search_requesting_no_candidates_gets_none():
    logits = random_logits(5)
    first, idle = make_search(3), make_search(2)
    steps = [make_step(idle, 0, 2, 0), make_step(first, 2, 5, 6)]
    result = make_step_runner(logits).run(make_batch([idle] * 2 + [first] * 3, beams=steps)).result
    assert result.rows() == [[]] * 5 and result.beams[0] is None
    assert_ranked(result.beams[1], logits, steps[1], first)


def test_batch_without_searches_has_no_candidates():
    assert make_step_runner(random_logits(1)).run(make_batch([greedy()])).result.beams == []


def test_allowed_tokens_go_to_their_rows():
    logits = random_logits(4)
    allowed = allow({0: [5, 9], 2: [7]})  # the second row samples nothing
    infos = [greedy(), greedy(), greedy(), greedy()]
    result = make_step_runner(logits).run(make_batch(infos, [True, False, True, True], allowed=allowed)).result
    expected = [[5 if logits[0, 5] > logits[0, 9] else 9], [], [int(logits[2].argmax())], [7]]
    assert result.rows() == expected


def test_logprobs_of_ordinary_rows_and_of_beams():
    logits = random_logits(4)
    search, plain = make_search(3, logprobs=LogprobOptions(top_k=2)), greedy(logprobs=LogprobOptions(top_k=1))
    output = make_step_runner(logits).run(make_batch([search] * 3 + [plain], beams=[make_step(search, 0, 3, 6)]))
    assert list(output.output_logprobs) == [3]
    expected = logits.log_softmax(-1)
    np.testing.assert_allclose(output.output_logprobs[3].values, [expected[3].max()], atol=1e-5)
    (found,) = output.result.beams
    assert found is not None and found.top_ids is not None and found.top_logprobs is not None
    assert np.array_equal(found.top_ids, expected[:3].topk(2).indices)
    np.testing.assert_allclose(found.top_logprobs, expected[:3].topk(2).values, atol=1e-5)


@pytest.mark.parametrize("min_new_tokens", [0, 2])
def test_stop_strings_of_candidates_and_of_ordinary_rows(min_new_tokens):
    """The search takes two steps; in the second, what its two beams say completes the stop string in one of them."""
    he, the, space = (BACKEND.get_vocab()[token] for token in ("he", "the", "Ġ"))
    search = make_search(2, stop=("xyz", "e the"), min_new_tokens=min_new_tokens)
    plain = greedy(stop=("he",))
    before = torch.full((1, VOCAB_SIZE), -50.0)
    before[0, space] = 5.0
    step_runner = make_step_runner(before)
    assert step_runner.run(make_batch([plain])).result.rows() == [[space]]

    group = BeamGroup(search.sampling, 100, None, 1)
    first = torch.full((2, VOCAB_SIZE), -50.0)
    first[0, [he, space]] = torch.tensor([5.0, 4.0])
    first[1, the] = 5.0
    step_runner._runner = cast(Any, Table(first))
    steps = [make_step(search, 0, 1, 2, group.sequences())]
    result = step_runner.run(make_batch([search, plain], opened=[search], beams=steps)).result
    assert result.stop_matches == {1: StopMatch(0, 1, "t")}
    (candidates,) = result.beams
    assert candidates is not None and candidates.stops == {}
    group.select(candidates, ())
    assert group.sequences().tolist() == [[he], [space]]

    second = torch.full((2, VOCAB_SIZE), -50.0)
    spaced = BACKEND.get_vocab()["Ġthe"]
    second[:, spaced] = 5.0
    step_runner._runner = cast(Any, Table(second))
    steps = [make_step(search, 0, 2, 2, group.sequences())]
    result = step_runner.run(make_batch([search, search], opens=False, beams=steps)).result
    (found,) = result.beams
    assert found is not None
    assert list(zip(found.parents.tolist(), found.tokens.tolist())) == [(0, spaced), (1, spaced)]
    assert found.stops == ({} if min_new_tokens else {0: StopMatch(1, 0, "h")})
    assert step_runner._stop_strings is not None and len(step_runner._stop_strings) == 2
    step_runner.run(make_batch([greedy(), greedy()], closed=[search.serial]))
    assert len(step_runner._stop_strings) == 1


def test_stop_match_of_multi_token_row_names_completing_token():
    """Rows of any length, as steps that compute several tokens bring them."""
    the, space = (BACKEND.get_vocab()[token] for token in ("the", "Ġ"))
    stops, plain = greedy(stop=("the the",)), greedy()
    step_runner = make_step_runner(random_logits(3))
    step = step_runner.launch(make_batch([plain, stops, plain]), None)
    result = StepResult.of_rows([[the, space], [the, space, the, space, the], []])
    step_runner._take_tokens(step.batch, [], result)
    assert result.stop_matches == {1: StopMatch(0, 0, "", token=2)}


@pytest.mark.parametrize("has_states", [False, True])
def test_beginnings_of_stop_strings_are_reported_where_states_are_kept_for_them(has_states: bool):
    the, space = (BACKEND.get_vocab()[token] for token in ("the", "Ġ"))
    infos = [greedy(stop=("the the",)), greedy(stop=("the the",), no_stop_trim=True), greedy(stop=("xa",)), greedy()]
    step_runner = make_step_runner(random_logits(4))
    step = step_runner.launch(make_batch(infos), None)
    if has_states:
        step.batch.states = StateRows(*([np.zeros(4, dtype=np.int32)] * 4))
    result = StepResult.of_rows([[space, the, space]] * 4)
    step_runner._take_tokens(step.batch, [], result)
    assert result.stop_begins == ({0: 1} if has_states else {})


def test_raising_stop_check_fails_only_its_row(monkeypatch: pytest.MonkeyPatch):
    """For sequences, and for a beam search, whose rows are checked while it is ranked."""
    he = BACKEND.get_vocab()["he"]
    logits = torch.full((3, VOCAB_SIZE), -50.0)
    logits[:, he] = 5.0
    bad, good, search = greedy(stop=("he",)), greedy(stop=("he",)), make_search(2, stop=("he",))
    step_runner = make_step_runner(logits)
    checker = step_runner._stop_string_checker()
    check = checker.check_tokens

    def raise_for_one(serial: int, *args: Any) -> Any:
        if serial == bad.serial:
            raise RuntimeError("cannot be looked at")
        return check(serial, *args)

    monkeypatch.setattr(checker, "check_tokens", raise_for_one)
    monkeypatch.setattr(checker, "check_beams", Mock(side_effect=RuntimeError))
    steps = [make_step(search, 2, 3, 2, BeamGroup(search.sampling, 100, None, 1).sequences())]
    result = step_runner.run(make_batch([bad, good, search], beams=steps)).result
    assert sorted(result.unchecked_rows) == [0, 2]
    assert result.stop_matches == {1: StopMatch(0, 0, "")}
    assert step_runner.run(make_batch([greedy(), greedy(), greedy()])).result.unchecked_rows == ()


def test_sequence_closed_during_its_step_is_skipped():
    """Its tokens still come out, and nothing is looked for in them."""
    logits = torch.full((2, VOCAB_SIZE), -50.0)
    he = BACKEND.get_vocab()["he"]
    logits[:, he] = 5.0
    closed, kept = greedy(stop=("he",)), greedy(stop=("he",))
    step_runner = make_step_runner(logits)
    first = step_runner.launch(make_batch([closed, kept]), None)
    step_runner._runner = cast(Any, Table(logits[:1]))
    second = step_runner.launch(make_batch([kept], opens=False, closed=[closed.serial]), first)
    result = step_runner.finish(first).result
    assert result.rows() == [[he], [he]] and result.stop_matches == {1: StopMatch(0, 0, "")}
    assert step_runner.finish(second).result.rows() == [[he]]
    assert len(step_runner._sequences) == 1


def test_step_may_close_a_never_opened_sequence():
    """Its first step failed before it was launched."""
    step_runner = make_step_runner(random_logits(1))
    assert len(step_runner.run(make_batch([greedy()], closed=[10**6])).result.rows()) == 1


def broken_logits(rows: int) -> torch.Tensor:
    """Row 1 holds a NaN, row 2 +inf, row 3 nothing but -inf; all others are sound, and row 4 has many -inf."""
    logits = random_logits(rows)
    logits[1, 9] = torch.nan
    logits[2, 9] = torch.inf
    logits[3] = -torch.inf
    logits[4, : VOCAB_SIZE // 2] = -torch.inf
    return logits


@pytest.mark.parametrize("wish", [{"temperature": 0.0}, {"temperature": 1.0}, {"logprobs": LogprobOptions(top_k=2)}])
def test_non_finite_rows_are_reported(wish):
    logits = broken_logits(6)
    infos = [make_info(serial=next(SERIALS), **wish) for _ in range(7)]
    samples = [True, True, False, True, True, True, True]  # the third has no logits
    result = make_step_runner(torch.cat([logits[:2], logits[:1], logits[2:]])).run(make_batch(infos, samples)).result
    assert result.failed_rows == {1: 0, 3: 0, 4: 0}
    assert [len(row) for row in result.rows()] == [1, 1, 0, 1, 1, 1, 1]


def test_non_finite_beam_fails_its_search():
    logits = broken_logits(7)
    sound, broken, idle = make_search(2), make_search(3), make_search(1)
    order = torch.tensor([0, 4, 5, 2, 6, 3])
    steps = [make_step(sound, 0, 2, 4), make_step(broken, 2, 5, 6), make_step(idle, 5, 6, 0)]
    infos = [sound] * 2 + [broken] * 3 + [idle]
    result = make_step_runner(logits[order]).run(make_batch(infos, beams=steps)).result
    assert result.failed_rows == {2: 0, 3: 0, 4: 0}


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_non_finite_prompt_logprobs_fail_before_sampling(broken):
    """A chunk in the middle of a prompt: there are hidden states for its logprobs, and no logits to sample from."""
    hidden, head = torch.eye(6, 8), random_logits(8)

    def compute_logits(states: torch.Tensor) -> torch.Tensor:
        logits = states @ head
        logits[states[:, 4] > 0, 3] = broken
        return logits

    infos = [greedy(logprobs=LogprobOptions(0, 1)), greedy(), greedy(logprobs=LogprobOptions(0, 1))]
    targets = [np.array([5, 6, 7], dtype=np.int32), np.array([8, 9, 10], dtype=np.int32)]
    extend_lens = np.array([3, 1, 3], dtype=np.int32)
    batch = make_batch(
        infos,
        [False, False, False],
        extend_lens=extend_lens,
        logprob_starts=np.array([0, 1, 0], dtype=np.int32),
        logprob_targets=targets,
    )
    step_runner = make_step_runner(random_logits(3))
    output = ForwardOutput(torch.empty(0, VOCAB_SIZE), hidden)
    runner = SimpleNamespace(
        forward=lambda *_: output,
        compute_logits=compute_logits,
        sound_tokens=lambda batch, rows: dict.fromkeys(rows, 0),
    )
    step_runner._runner = cast(Any, runner)
    assert step_runner.run(batch).result.failed_rows == {2: 0}
