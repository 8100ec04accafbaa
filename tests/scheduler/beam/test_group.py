"""One search as numbers: what it notes of each step, and of the sequences that end. No scheduler, no KV."""

from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.batch import BeamCandidates, StopMatch
from baton.scheduler.beam.search import BeamGroup
from baton.scheduler.constraints.item_trie import ITEM, ItemConstraint, ItemTrie
from baton.scheduler.outcome import FinishReason
from baton.scheduler.sampling_params import SamplingParams

EOS = 99


def group(width: int, new: int, **more) -> BeamGroup:
    return BeamGroup(SamplingParams(max_new_tokens=new, beam_width=width, n=width, **more), new, None, 1)


def candidates(parents: list[int], tokens: list[int], scores: list[float], **more) -> BeamCandidates:
    """The logprobs are the scores' tenths."""
    each = np.array(scores, dtype=np.float32)
    return BeamCandidates(
        np.array(parents, dtype=np.int32), np.array(tokens, dtype=np.int32), each, each / np.float32(10), **more
    )


def likeliest(*rows: list[int]) -> dict[str, np.ndarray]:
    ids = np.array(rows, dtype=np.int32)
    return {"top_ids": ids, "top_logprobs": -ids.astype(np.float32)}


def test_results_have_top_logprobs_of_their_parent_beams() -> None:
    search = group(2, 2)
    search.select(candidates([0, 0, 0], [5, 6, 7], [-1, -2, -3], **likeliest([5, 6])), [EOS])
    search.select(candidates([1, 0, 0, 1], [8, 9, 10, 11], [-3, -4, -5, -6], **likeliest([30, 31], [40, 41])), [EOS])
    assert search.done
    first, second = search.results
    assert first.ids.tolist() == [6, 8] and second.ids.tolist() == [5, 9]
    assert first.top_ids is not None and first.top_logprobs is not None
    assert first.top_ids.tolist() == [[5, 6], [40, 41]]
    assert first.top_logprobs.tolist() == [[-5, -6], [-40, -41]]
    assert second.top_ids is not None and second.top_logprobs is not None
    assert second.top_ids.tolist() == [[5, 6], [30, 31]]
    assert second.top_logprobs.tolist() == [[-5, -6], [-30, -31]]
    assert first.logprobs.tolist() == pytest.approx([-0.2, -0.3]) and first.cumulative_logprob == pytest.approx(-0.5)


def test_results_have_no_top_logprobs_unless_given() -> None:
    search = group(2, 1)
    search.select(candidates([0, 0], [5, 6], [-1, -2]), [EOS])
    assert all(result.top_ids is None and result.top_logprobs is None for result in search.results)


@pytest.mark.parametrize("no_stop_trim", [False, True])
def test_kept_tokens_for_each_finish_reason(no_stop_trim: bool) -> None:
    search = group(4, 3, stop=("x", "y"), no_stop_trim=no_stop_trim)
    search.select(candidates([0] * 4, [5, 6, 7, 8], [-1, -2, -3, -4]), [EOS])
    stops = {0: StopMatch(1, 0, "tail"), 1: StopMatch(0, 1)}
    search.select(candidates([0, 1, 2, 3, 0], [EOS, 10, 11, 12, 13], [-1, -2, -3, -4, -5], stops=stops), [EOS])
    by_id, by_string = search.finished
    assert by_id.finish == FinishReason(type="stop", matched=EOS), "an id goes before a stop string"
    assert by_string.finish == FinishReason(type="stop", matched="x")
    assert (by_id.kept_tokens, by_id.visible_tail) == ((2 if no_stop_trim else 1), "")
    assert (by_string.kept_tokens, by_string.visible_tail) == ((2 if no_stop_trim else 1), "")
    search.select(candidates([0, 1], [14, 15], [-5, -6]), [EOS])
    assert [result.finish.type for result in search.finished] == ["stop", "stop", "length", "length"]
    assert search.finished[-1].kept_tokens == 3


def test_text_before_trimmed_stop_string_is_kept() -> None:
    search = group(1, 3, stop=("x",))
    search.select(candidates([0, 0], [5, 6], [-1, -2], stops={0: StopMatch(0, 0, "tail")}), [EOS])
    assert (search.finished[0].kept_tokens, search.finished[0].visible_tail) == (0, "tail")


def test_ends_before_min_new_tokens_are_ignored() -> None:
    search = group(2, 4, min_new_tokens=1, stop=("x",))
    assert search.bans_ends
    search.select(candidates([0, 0], [EOS, 6], [-1, -2], stops={1: StopMatch(0, 0)}), [EOS])
    assert search.finished == [] and search.num_live == 2 and not search.bans_ends
    search.select(candidates([0, 1], [EOS, 6], [-1, -2]), [EOS])
    assert [result.ids.tolist() for result in search.finished] == [[EOS, EOS]]


def test_end_of_item_finishes_with_stop() -> None:
    trie = ItemTrie.build(np.array([[10, 11], [12, -1]], dtype=np.int32))
    sampling = SamplingParams(max_new_tokens=2, beam_width=2, n=2, item_trie="items")
    search = BeamGroup(sampling, 2, ItemConstraint(trie, "items"), 0)
    search.select(candidates([0, 0], [12, 10], [-1, -2]), [])
    search.select(candidates([0], [11], [-3]), [])
    assert [result.ids.tolist() for result in search.results] == [[12], [10, 11]]
    assert {result.finish for result in search.results} == {FinishReason(type="stop", matched=ITEM)}
    assert [result.kept_tokens for result in search.results] == [1, 2]


def test_search_without_live_beams_is_done() -> None:
    search = group(2, 9, stop_token_ids=(98,))
    search.select(candidates([0, 0], [EOS, 98], [-1, -2]), [EOS, 98])
    assert search.done and search.num_live == 0 and len(search.results) == 2
    short = group(2, 9)
    short.select(candidates([0], [EOS], [-1]), [EOS])
    assert short.done and short.shortfall is not None


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "improves"),
    [
        (True, 1.0, False),
        (False, 1.0, False),
        ("never", 1.0, True),  # -4 / 8
        ("never", 0.5, False),  # -4 / 8 ** 0.5 = -1.41
        ("never", 0.75, True),  # -4 / 8 ** 0.75 = -0.84
        ("never", 0.0, False),
    ],
)
def test_search_continues_while_a_beam_can_improve_results(
    early_stopping: bool | str, length_penalty: float, improves: bool
) -> None:
    search = group(1, 8, early_stopping=early_stopping, length_penalty=length_penalty)
    search.select(candidates([0, 0], [EOS, 6], [-1.0, -1.5]), [EOS])
    if early_stopping is not True:
        assert search.finished[0].score == -1.0
    if not search.done:
        search.select(candidates([0], [7], [-4.0]), [EOS])
    assert search.done is not improves


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_better_hypothesis_replaces_worse_one(early_stopping: bool | str) -> None:
    search = group(2, 9, early_stopping=early_stopping, length_penalty=1.0)
    search.select(candidates([0, 0, 0, 0], [EOS, 6, 7, 8], [-1.0, -1.5, -1.6, -1.7]), [EOS])
    search.select(candidates([0, 1, 0, 1], [EOS, 9, 9, 5], [-1.8, -1.9, -2.0, -2.1]), [EOS])
    assert [result.ids.tolist() for result in search.finished] == [[6, EOS], [EOS]]
    assert [result.score for result in search.finished] == pytest.approx([-0.9, -1.0])
    selected = search.select(candidates([0, 1, 0, 1], [EOS, 9, 9, 5], [-2.1, -2.4, -2.5, -2.6]), [EOS])
    if early_stopping is True:
        assert search.done and selected.finished == []
        return
    assert [result.ids.tolist() for result in search.finished] == [[7, 9, EOS], [6, EOS]]
    ((entered, parent),) = selected.finished
    assert entered is search.finished[0] and parent == 0


def test_cumulative_logprobs_are_summed_in_double_precision() -> None:
    """The summands are float32 numbers."""
    search = group(1, 3)
    for score in (-1e8, -1.0, -3.0):
        search.select(candidates([0], [5], [score]), [])
    assert search.results[0].cumulative_logprob == float(np.float32(-1e7)) + float(np.float32(-0.1)) + float(
        np.float32(-0.3)
    )
