"""Oracle: Python's own `re`, over the whole decoded text after every token."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.runtime.text import stop_regex
from baton.runtime.text.incremental_decode import IncrementalDecoder
from baton.runtime.text.stop_regex import MAX_PROGRAM, WINDOW, StopRegexMatcher, check_stop_regex
from baton.runtime.text.stop_strings import StopStringChecker
from baton.runtime.text.token_bytes import TokenBytes
from baton.scheduler.batch import StopMatch
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles import trained_tokenizers

BACKEND = trained_tokenizers.byte_level()
TOKENS = TokenBytes(BACKEND)
A, B, HE, THE, SPACE, HALF, OTHER_HALF, END, NEWLINE = (
    BACKEND.get_vocab()[token] for token in ("a", "b", "he", "the", "Ġ", "Ã", "©", "<|im_end|>", "Ċ")
)
VOCABULARY = [A, B, HE, THE, SPACE, HALF, OTHER_HALF, END, NEWLINE]
PATTERNS = [
    "ab", "a+b", "^a", r"\Ab", r"\bthe\b", r"(?m)^b", r"(?m)a$", "é.", "é{2}", "[^a]\\n", "(a|b)*e b", r"he\B",
    r"\s\S\s", r"<\|im_end\|>", "m_e.*a", "(?s)a.*\\n", "(?i)THE ?HE", r"\Bb", "ba|aa|é", "[\u0080-\u00ff]b", "b{3,5}a",
]  # fmt: skip


def slow_search(ids: list[int], patterns: list[str], min_new: int) -> tuple[int, int] | None:
    """(tokens read, index) of the first match, from the whole text."""
    decoder, text, first = IncrementalDecoder(TOKENS, skip_special_tokens=False), "", 0
    for number, token_id in enumerate(ids, 1):
        text += decoder.push_ids((token_id,))
        if number <= min_new:
            first = len(text)
            continue
        for index, pattern in enumerate(patterns):
            if re.compile(pattern, re.ASCII).search(text, first):
                return number, index
    return None


def search(ids: list[int], patterns: list[str], min_new: int = 0) -> tuple[int, int] | None:
    matcher = StopRegexMatcher(TOKENS, patterns, min_new)
    for number, token_id in enumerate(ids, 1):
        if (found := matcher.push_id(token_id)) is not None:
            assert found == StopMatch(found.stop_index, number, is_regex=True)
            return number, found.stop_index
    return None


@given(
    ids=st.lists(st.sampled_from(VOCABULARY), max_size=60),
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3),
    min_new=st.integers(0, 5),
)
@example(ids=[A] * 900 + [B, NEWLINE], patterns=["ba|\\n"], min_new=0)
@example(ids=[HALF, OTHER_HALF, B], patterns=["[\u0080-\u00ff]b"], min_new=1)
@settings(deadline=None, derandomize=True, max_examples=500)
def test_incremental_search_equals_whole_text_search(ids: list[int], patterns: list[str], min_new: int) -> None:
    assert search(ids, patterns, min_new) == slow_search(ids, patterns, min_new)


class Watched:
    """A regex that notes how much text it is given."""

    def __init__(self, regex) -> None:
        self._regex, self.longest, self.starts = regex, 0, []

    def search(self, text: bytes, begin: int):
        self.longest = max(self.longest, len(text) - begin)
        self.starts.append((begin, text[begin : begin + 1]))
        return self._regex.search(text, begin)


@pytest.mark.parametrize("token", [[A], [HALF, OTHER_HALF]], ids=["letters", "characters of two bytes"])
def test_regex_cost_per_token_is_one_window(token: list[int]) -> None:
    matcher = StopRegexMatcher(TOKENS, ["a.*b|é.*b"])
    watched = Watched(matcher._regexes[0])
    matcher._regexes = [watched]
    for token_id in token * 4000:
        assert matcher.push_id(token_id) is None
    assert watched.longest == WINDOW + len(token), "the window, and the new token"
    assert len(matcher._tail) <= 2 * WINDOW + 2
    assert all(start & 0xC0 != 0x80 for _, text in watched.starts for start in text), "no search begins in a character"


def test_regex_match_begins_at_most_one_window_back() -> None:
    for between, found in ((WINDOW - 1, True), (WINDOW, False)):
        ids = [B] * 3000 + [A] + [SPACE] * between + [NEWLINE]
        assert search(ids, ["a[^a]*\\n"]) == ((len(ids), 0) if found else None)


@pytest.mark.parametrize("pattern", ["^he", r"\Ahe", r"\bhe", "(?m)^he"])
def test_regex_anchors_do_not_match_at_window_start(pattern: str) -> None:
    """The text has been cut there, but it goes on from a letter."""
    for lead in range(3):
        ids = [A] * (2 * WINDOW + lead) + [HE] * WINDOW
        assert search(ids, [pattern]) is None
    assert search([A] * 5 * WINDOW + [NEWLINE, HE], [pattern]) == (
        None if pattern in ("^he", r"\Ahe") else (5 * WINDOW + 2, 0)
    )


def test_first_regex_wins_and_strings_precede_regexes() -> None:
    assert search([HE], ["x", "e", "h"]) == (1, 1)
    checker, no_ids = StopStringChecker(TOKENS), np.empty(0, dtype=np.int32)
    both = SamplingParams(stop=("e",), stop_regex=("h",))
    assert checker.check_tokens(1, both, no_ids, [HE]) == StopMatch(0, 0, "h")
    assert checker.check_tokens(3, both, np.array([A], dtype=np.int32), [A, THE]) == StopMatch(0, 2, "th", token=1)
    either = SamplingParams(stop=("x",), stop_regex=("h",))
    assert checker.check_tokens(2, either, no_ids, [A, HE, A]) == StopMatch(0, 2, token=1, is_regex=True)
    assert len(checker) == 3
    checker.drop(2)
    assert len(checker) == 2


def test_stop_state_follows_sequence_after_lost_step() -> None:
    checker, sampling = StopStringChecker(TOKENS), SamplingParams(stop_regex=("^aab",))
    seen = np.array([A, A], dtype=np.int32)
    assert checker.check_tokens(0, sampling, seen, [A]) is None  # a token that is then lost: its step failed
    assert checker.check_tokens(0, sampling, seen, [B]) == StopMatch(0, 3, is_regex=True)


def test_usual_stop_regexes_are_accepted() -> None:
    check_stop_regex([r"\d+\.\s", r"(?i)answer:\s*[A-D]\b", r"</?[a-z]{1,20}>", "[。！？]", r"\n\n\n+", "(foo|bar)$"])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(?=b)", r"look-arounds are not supported.*\(\?="),
        ("a(?!b)", "look-arounds are not supported"),
        ("(?<=a)b", "look-arounds are not supported"),
        ("(?<!a)b", "look-arounds are not supported"),
        (r"(a)\1", "back-references are not supported"),
        ("(?P<n>a)(?P=n)", "back-references are not supported"),
        (r"a\Z", r"use \\z for the end of the text"),
        ("(a", r"missing \): \(a; the syntax is RE2's"),
        ("[a", "missing ]"),
        ("a**", "bad repetition operator"),
        ("a{2000}", "repeat less"),
        (r"\pL{9}", "instructions, at most 500 are served|too large"),
        ("a{300}b{300}", "with it the expressions compile to [0-9]+ instructions, at most 500"),
        ("a*", "matches the empty text"),
        ("$", "matches the empty text"),
        ("x|", "matches the empty text"),
        ("a\ud800", "not valid Unicode"),
    ],
)
def test_refusals_name_the_fault(pattern: str, message: str) -> None:
    with pytest.raises(RequestRefused, match=message) as refusal:
        check_stop_regex(["fine", pattern])
    assert refusal.value.param == "stop_regex" and refusal.value.message.startswith("stop_regex holds ")
    assert len(refusal.value.message) < 400


def test_stop_regexes_of_one_request_are_bounded_together() -> None:
    each = "a{150}"
    check_stop_regex([each] * 3)
    with pytest.raises(RequestRefused, match="instructions, at most 500"):
        check_stop_regex([each] * 4)


def test_hostile_stop_regexes_have_bounded_cost() -> None:
    """What backtracking engines take for ever with; a stall would end this by the suite's time limit."""
    hostile = ["(a+)+b", "(a|aa)+c", "([ab]*)*c", "(a?){80}(a){80}c", "[ab]*a[ab]{90}c"]
    for pattern in hostile:
        check_stop_regex([pattern])
        regex = stop_regex._compiled(pattern)
        assert regex.programsize <= MAX_PROGRAM
        assert search([A] * 300, [pattern]) is None
