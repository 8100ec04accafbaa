"""When a sequence ends, what counts if several ends fall on one token, and what a child inherits of it."""

from __future__ import annotations

import numpy as np
import pytest

from baton.scheduler.batch import StepResult, StopMatch
from baton.scheduler.constraints.item_trie import ITEM, ItemConstraint, ItemTrie
from baton.scheduler.outcome import FinishReason
from baton.scheduler.request import Request
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.stopping_criteria import Ending, StoppingCriteria
from tests.doubles.specs import make_spec

EOS = 99
TRIE = ItemTrie.build(np.array([[10, 11], [10, 7], [10, EOS]], dtype=np.int32))
ENDINGS = StoppingCriteria((EOS,))


def request(*, constrained: bool = False, **sampling) -> Request:
    """It has not generated anything yet and may generate 3 tokens."""
    constraint = ItemConstraint(TRIE, "items") if constrained else None
    spec = make_spec("r", [1, 2], SamplingParams(max_new_tokens=3, **sampling))
    made = Request(spec, index=0, seed=0, arrival=0.0, serial=0, constraint=constraint)
    made.prompt_len, made.max_new_tokens = 2, 3
    made.constraint_state = constraint.start() if constraint is not None else None
    return made


def end(tokens: list[int], match: StopMatch | None = None, **more) -> tuple[tuple[int, ...], Ending | None]:
    return ENDINGS.take_tokens(request(**more), tokens, match)


def stop(matched: int | str) -> FinishReason:
    return FinishReason(type="stop", matched=matched)


@pytest.mark.parametrize(("no_stop_trim", "kept"), [(False, 1), (True, None)])
def test_matched_stop_is_inherited_only_without_trimming(no_stop_trim: bool, kept: int | None) -> None:
    more = {"no_stop_trim": no_stop_trim, "stop": ("x", "y"), "stop_token_ids": (7,)}
    assert end([5, 7, 6], **more) == ((5, 7), Ending(stop(7), kept))
    assert end([5, EOS, 6], **more) == ((5, EOS), Ending(stop(EOS), kept))
    match = StopMatch(1, kept_tokens=1, token=1)
    assert end([5, 6, 6], match, **more) == ((5, 6), Ending(stop("y"), kept))


def test_length_and_constraint_endings_keep_all_tokens() -> None:
    assert end([5, 6]) == ((5, 6), None)
    assert end([5, 6, 8, 9]) == ((5, 6, 8), Ending(FinishReason(type="length")))
    assert end([10, 11, 5], constrained=True) == ((10, 11), Ending(stop(ITEM)))


def test_precedence_of_endings() -> None:
    match = StopMatch(0, kept_tokens=1, token=1)
    both = {"stop": ("x",), "stop_token_ids": (7,), "constrained": True}
    assert end([10, 7], match, **both) == ((10, 7), Ending(stop(7), 1)), "an id goes before a string"
    assert end([10, 11], match, **both) == ((10, 11), Ending(stop("x"), 1)), "a string before the constraint"
    assert end([10, EOS], constrained=True) == ((10, EOS), Ending(stop(ITEM))), "eos is a token of items like any other"


def test_stops_are_ignored_before_min_new_tokens() -> None:
    more = {"min_new_tokens": 2, "stop": ("x",)}
    assert end([EOS, EOS], **more) == ((EOS, EOS), None)
    assert end([EOS, EOS, EOS], **more) == ((EOS, EOS, EOS), Ending(stop(EOS), 2))
    assert end([5, 6], StopMatch(0, 1, token=1), **more) == ((5, 6), None)
    assert end([5, 6, 8], StopMatch(0, 2, token=2), **more) == ((5, 6, 8), Ending(stop("x"), 2))


def test_regex_stop_ends_output_but_is_kept() -> None:
    """It stands behind a string, which the search for both sees to, and before the constraint."""
    match = StopMatch(1, kept_tokens=2, token=1, is_regex=True)
    more = {"stop": ("x", "y"), "stop_regex": ("a", "b+"), "stop_token_ids": (7,), "constrained": True}
    assert end([10, 11, 5], match, **more) == ((10, 11), Ending(stop("b+"))), "a child inherits all of it"
    assert end([10, 7], match, **more) == ((10, 7), Ending(stop(7), 1))
    assert not ENDINGS.cuts_token(request(**more), [10, 11], match)
    assert end([5, 6], match, min_new_tokens=2, stop_regex=("a", "b+")) == ((5, 6), None)


def test_end_ids() -> None:
    assert ENDINGS.end_ids(request(stop_token_ids=(7,))) == {7, EOS}
    assert ENDINGS.end_ids(request(stop_token_ids=(7,), ignore_eos=True)) == {7}
    assert not ENDINGS.ends_by_id(request(ignore_eos=True), EOS) and ENDINGS.ends_by_id(request(), EOS)


class TestEndsWithinAToken:
    MATCH = StopMatch(0, 1, visible_tail="ta", token=1)

    def test_cuts_token_when_text_precedes_the_match(self) -> None:
        assert ENDINGS.cuts_token(request(stop=("x",)), [5, 6], self.MATCH)

    def test_cuts_no_token_without_preceding_text(self) -> None:
        assert not ENDINGS.cuts_token(request(stop=("x",)), [5, 6], StopMatch(0, 1, token=1))

    def test_cuts_no_token_with_no_stop_trim(self) -> None:
        assert not ENDINGS.cuts_token(request(stop=("x",), no_stop_trim=True), [5, 6], self.MATCH)

    def test_cuts_no_token_of_ended_request(self) -> None:
        ended = request(stop=("x",))
        ended.finish = FinishReason(type="length")
        assert not ENDINGS.cuts_token(ended, [5, 6], self.MATCH)

    @pytest.mark.parametrize(("tokens", "cuts"), [([EOS, 6, 5], False), ([5, EOS, 5], False), ([5, 6, EOS], True)])
    def test_earlier_end_id_prevents_token_cut(self, tokens: list[int], cuts: bool) -> None:
        assert ENDINGS.cuts_token(request(stop=("x",)), tokens, self.MATCH) is cuts

    def test_ends_within_token_lists_cut_requests(self) -> None:
        requests = [request(stop=("x",)) for _ in range(3)]
        result = StepResult.of_rows([[5, 6], [5, EOS], [5, 6]])
        assert ENDINGS.ends_within_token(requests, result) == []
        result.stop_matches.update({1: self.MATCH, 2: self.MATCH})
        assert ENDINGS.ends_within_token(requests, result) == [(requests[2], self.MATCH)]
