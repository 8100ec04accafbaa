"""Oracle: a search of the whole decoded text after every token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.runtime.text.incremental_decode import IncrementalDecoder
from baton.runtime.text.stop_strings import StopStringChecker, StopStringMatcher, find_final_stop, held_back
from baton.runtime.text.token_bytes import TokenBytes
from baton.scheduler.batch import StopMatch
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles import trained_tokenizers

BACKEND = trained_tokenizers.byte_level()
TOKENS = TokenBytes(BACKEND)
CHECKED = settings(deadline=None, derandomize=True, max_examples=300)
# Few tokens, so that stop strings of their letters are hit often; half characters and a special token among them.
VOCABULARY = [
    BACKEND.get_vocab()[token] for token in ("a", "b", "he", "the", "Ġ", "Ã", "©", "Ġthe", "aÃ", "<|im_end|>", "Ċ")
]
STOPS = st.text(alphabet="abthe é\n", min_size=1, max_size=5) | st.sampled_from(["<|im_end|>", "a<|im", "end|>b"])


def slow_search(ids: list[int], stop: list[str], min_new: int) -> tuple[int, StopMatch] | None:
    """(tokens read, match) of the first match, from the whole text."""
    decoder = IncrementalDecoder(TOKENS, skip_special_tokens=False)
    text, ends = "", [0]
    for n, token_id in enumerate(ids, start=1):
        old, text = text, text + decoder.push_ids((token_id,))
        hits = [
            (start, index)
            for start in range(len(text))
            for index, string in enumerate(stop)
            if text.startswith(string, start) and start + len(string) > len(old)
        ]
        if hits and n > min_new:
            start, index = min(hits)
            kept = max(i for i, end in enumerate(ends) if end is not None and end <= start)
            return n, StopMatch(index, kept, text[ends[kept] : start])
        ends.append(None if decoder.has_pending_bytes else len(text))  # type: ignore[arg-type]
    return None


@given(
    ids=st.lists(st.sampled_from(VOCABULARY), max_size=80),
    stop=st.lists(STOPS, min_size=1, max_size=4),
    min_new=st.integers(0, 6),
)
@example(ids=VOCABULARY[:1] * 700 + VOCABULARY[1:2], stop=["ab"], min_new=0)
@example(ids=VOCABULARY[5:6] * 300 + VOCABULARY[:2], stop=["ab"], min_new=0)
@CHECKED
def test_incremental_search_equals_whole_text_search(ids, stop, min_new):
    matcher = StopStringMatcher(TOKENS, stop, min_new)
    expected = slow_search(ids, stop, min_new)
    found, kept = None, []
    for n, token_id in enumerate(ids, start=1):
        match = matcher.push_id(token_id)
        if match is not None:
            found = n, match
            break
        kept.append(matcher.kept_tokens())
    assert found == expected
    if found is not None:
        n, match = found
        assert all(count is not None and count <= match.kept_tokens for count in kept[match.kept_tokens :])
        assert find_final_stop(TOKENS, ids[:n], stop[match.stop_index]) is not None


def encode(text: str) -> list[int]:
    return BACKEND.encode(text, add_special_tokens=False).ids


def push_all(stop: list[str], ids: list[int]) -> list[StopMatch | None]:
    matcher = StopStringMatcher(TOKENS, stop)
    return [matcher.push_id(i) for i in ids]


def test_match_across_tokens_and_from_inside_a_token():
    ids = encode("the river stops")
    found = next(f for f in push_all(["er stop"], ids) if f)
    kept_text = BACKEND.decode(ids[: found.kept_tokens])
    assert kept_text + found.visible_tail == "the riv"


@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [
        (["er stop"], "the river", "the"),
        (["er stop"], "the river s", "the"),
        (["er stop"], "the rivers", None),
        (["xa", "er"], "the riv", None),
        (["the river is"], "the river", ""),
    ],
)
def test_tokens_that_would_be_kept_are_those_before_what_may_begin_a_stop_string(stop, text, kept):
    ids = encode(text)
    matcher = StopStringMatcher(TOKENS, stop)
    for token_id in ids:
        assert matcher.push_id(token_id) is None
    found = matcher.kept_tokens()
    assert (None if found is None else BACKEND.decode(ids[:found])) == kept


def test_a_character_of_two_tokens_is_kept_whole_or_not_at_all():
    first, second = VOCABULARY[5], VOCABULARY[6]  # the two bytes of é
    assert push_all(["a"], [first, second, VOCABULARY[0]])[-1] == StopMatch(0, 2, "")
    assert push_all(["é"], [VOCABULARY[0], first, second])[-1] == StopMatch(0, 1, "")


def test_the_earliest_match_wins_then_the_order_of_the_list():
    the = VOCABULARY[3]
    assert push_all(["he", "th", "t"], [the])[-1] == StopMatch(1, 0, "")
    assert push_all(["he", "t", "th"], [the])[-1] == StopMatch(1, 0, "")


def test_a_match_within_min_new_tokens_does_not_count_later():
    a, b = VOCABULARY[:2]
    matcher = StopStringMatcher(TOKENS, ["ab"], min_new_tokens=2)
    assert [matcher.push_id(i) for i in (a, b, a)] == [None] * 3
    assert matcher.push_id(b) == StopMatch(0, 2, "")


def test_stop_matcher_keeps_bounded_text():
    matcher = StopStringMatcher(TOKENS, ["never"])
    for token_id in encode("the river ") * 3000:
        assert matcher.push_id(token_id) is None
    assert len(matcher._text) < 200 and len(matcher._marks) < 100


def int32(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


class TestChecker:
    def test_stop_strings_are_matched_per_sequence(self):
        checker = StopStringChecker(TOKENS)
        a, b = VOCABULARY[:2]
        stops, silent = SamplingParams(stop=("zzz", "b")), SamplingParams(stop=("aa",))
        assert checker.check_tokens(1, stops, int32([]), [a]) is None
        assert checker.check_tokens(2, silent, int32([]), [a]) is None
        assert checker.check_tokens(1, stops, int32([a]), [b]) == StopMatch(
            stop_index=1, kept_tokens=1, visible_tail=""
        )
        assert checker.check_tokens(2, silent, int32([a]), []) is None, "a row that does not sample brings none"
        assert checker.check_tokens(2, silent, int32([a]), [a]) == StopMatch(0, 0, "")

    def test_only_generated_text_is_searched(self):
        """A prompt that ends with a is nothing that the checker hears of."""
        _, b = VOCABULARY[:2]
        assert StopStringChecker(TOKENS).check_tokens(0, SamplingParams(stop=("ab",)), int32([]), [b]) is None

    def test_stop_state_follows_sequence_after_lost_step(self):
        a, b = VOCABULARY[:2]
        checker, sampling = StopStringChecker(TOKENS), SamplingParams(stop=("aab",))
        assert (
            checker.check_tokens(0, sampling, int32([a, a]), [a]) is None
        )  # a token that is then lost: its step failed
        assert checker.check_tokens(0, sampling, int32([a, a]), [b]) == StopMatch(0, 0, "")

    def test_stop_match_names_the_completing_token(self):
        a, b = VOCABULARY[:2]
        sampling = SamplingParams(stop=("bb", "ab"))
        found = StopStringChecker(TOKENS).check_tokens(0, sampling, int32([a]), [a, b, b, a])
        assert found == StopMatch(1, 1, "", token=1), "what comes later, bb too, is not looked at"

    def test_drop_forgets_the_sequence(self):
        checker = StopStringChecker(TOKENS)
        checker.check_tokens(5, SamplingParams(stop=("x",)), int32([]), [VOCABULARY[0]])
        assert len(checker) == 1
        checker.drop(5)
        checker.drop(5)
        assert len(checker) == 0


@given(
    ids=st.lists(st.sampled_from(VOCABULARY), max_size=40),
    stop=st.lists(STOPS, min_size=1, max_size=3),
    min_new=st.integers(0, 4),
    data=st.data(),
)
@CHECKED
def test_stop_search_of_token_chunks_equals_slow_search(ids, stop, min_new, data):
    """The oracle reads all of them one by one. Now and then a step is lost, and asked for again."""
    checker = StopStringChecker(TOKENS)
    sampling = SamplingParams(stop=tuple(stop), min_new_tokens=min_new, skip_special_tokens=False)
    expected, at = slow_search(ids, stop, min_new), 0
    while at < len(ids):
        new = ids[at : at + data.draw(st.integers(1, 5))]
        if data.draw(st.integers(0, 4)) == 0:
            checker.check_tokens(
                0, sampling, int32(ids[:at]), data.draw(st.lists(st.sampled_from(VOCABULARY), max_size=3))
            )
        found = checker.check_tokens(0, sampling, int32(ids[:at]), new)
        if found is not None:
            assert expected is not None
            read, match = expected
            assert found == replace(match, token=read - at - 1) and found.token < len(new)
            return
        at += len(new)
    assert expected is None


@given(text=st.text(alphabet="ab", max_size=12), stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=6)))
@CHECKED
def test_held_back_is_the_longest_tail_that_begins_a_stop_string(text, stop):
    tails = [n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) and len(s) > n for s in stop)]
    assert held_back(text, stop) == max(tails, default=0)


@pytest.mark.parametrize(("text", "held"), [("abc", 0), ("ab#", 1), ("ab##", 2), ("###", 2), ("", 0)])
def test_held_back_examples(text, held):
    assert held_back(text, ["###"]) == held


class TestBeams:
    @pytest.mark.parametrize("seed", range(20))
    def test_random_beam_stops_equal_whole_text_search(self, seed):
        """Beams multiply, die and go on; now and then a step is lost or asked for twice."""
        rng = np.random.default_rng(seed)
        letters = np.array(VOCABULARY, dtype=np.int32)
        stop = tuple(rng.choice(["ab", "he", "é", "the a", "aé", "b<|im_end|>", "hethe", "a\n"], 3, replace=False))
        min_new = int(rng.choice([0, 0, 5]))
        sampling = SamplingParams(stop=stop, min_new_tokens=min_new, skip_special_tokens=False, beam_width=4)
        checker = StopStringChecker(TOKENS)
        sequences = np.empty((1, 0), dtype=np.int32)
        num_found = 0
        for _ in range(40):
            parents = rng.integers(0, len(sequences), 12).astype(np.int32)
            tokens = rng.choice(letters, 12)
            if rng.random() < 0.25:
                checker.check_beams(7, sampling, sequences, parents, tokens)
            found = checker.check_beams(7, sampling, sequences, parents, tokens)
            expected = {}
            for i, (parent, token) in enumerate(zip(parents, tokens)):
                ids = [*sequences[parent].tolist(), int(token)]
                hit = slow_search(ids, list(stop), min_new)
                if hit is not None and hit[0] == len(ids):
                    expected[i] = hit[1]
            assert found == expected, f"seed {seed}"
            num_found += len(found)
            live = [i for i in range(12) if i not in found]
            chosen = rng.choice(live or [0], int(rng.integers(1, 5)), replace=False) if len(live) > 4 else live[:1]
            if len(chosen) == 0:  # all ended: all over again under the same serial
                sequences = np.empty((1, 0), dtype=np.int32)
                continue
            grown = np.column_stack([sequences[parents[chosen]], tokens[chosen]]).astype(np.int32)
            sequences = np.unique(grown, axis=0)
            if rng.random() < 0.1:
                checker.drop(7)
        assert num_found > 3

    def test_beam_step_costs_one_push_per_beam_and_candidate(self, monkeypatch):
        """However long the output is."""
        pushes = []
        push = StopStringMatcher.push_id
        monkeypatch.setattr(
            StopStringMatcher, "push_id", lambda self, token: (pushes.append(token), push(self, token))[1]
        )
        checker, sampling = StopStringChecker(TOKENS), SamplingParams(stop=("never",), beam_width=2)
        sequences = np.empty((1, 0), dtype=np.int32)
        letters = np.array(VOCABULARY[:2], dtype=np.int32)
        for length in range(50):
            pushes.clear()
            parents = np.array([0, 0], dtype=np.int32)
            assert checker.check_beams(7, sampling, sequences, parents, letters) == {}
            assert len(pushes) == 2 + (len(sequences) if length else 0)
            sequences = np.column_stack([sequences[parents], letters])

    def test_rest_of_hidden_special_token_is_not_shown(self):
        end = VOCABULARY[9]
        for hidden, rest in ((True, ""), (False, "<|im")):
            sampling = SamplingParams(stop=("_end|>",), skip_special_tokens=hidden, beam_width=2)
            found = StopStringChecker(TOKENS).check_beams(
                0,
                sampling,
                np.array([[VOCABULARY[0]]], dtype=np.int32),
                np.zeros(1, np.int32),
                np.array([end], np.int32),
            )
            assert found == {0: StopMatch(0, 1, rest)}

    def test_drop_forgets_the_beams(self):
        checker, sampling = StopStringChecker(TOKENS), SamplingParams(stop=("x",), beam_width=2)
        nothing = np.empty((1, 0), dtype=np.int32)
        checker.check_beams(7, sampling, nothing, np.zeros(1, np.int32), np.array(VOCABULARY[:1], np.int32))
        assert len(checker) == 1
        checker.drop(7)
        assert len(checker) == 0
