from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.runtime.detokenizer import OutputText
from baton.runtime.text.stop_strings import StopStringMatcher
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import FinishReason
from tests.doubles import trained_tokenizers

TOKENIZER = Tokenizer(trained_tokenizers.byte_level(), trained_tokenizers.CONFIG)
END = TOKENIZER.token_to_id("<|im_end|>")
assert END is not None
LENGTH = FinishReason(type="length")


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def streamed(ids: list[int], finish: FinishReason, **options) -> list[str]:
    text = OutputText(TOKENIZER, **options)
    return [text.push_ids([i], finish if n == len(ids) else None) for n, i in enumerate(ids, start=1)]


def at_once(ids: list[int], finish: FinishReason, **options) -> str:
    return OutputText(TOKENIZER, **options).push_ids(ids, finish)


@given(
    text=st.text(alphabet="abthe é你\n#", max_size=30),
    stop=st.lists(st.text(alphabet="abthe é你\n#", min_size=1, max_size=4), max_size=3),
)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_streamed_and_whole_text_agree_and_omit_stop_strings(text, stop):
    ids, finish, matched_at = encode(text), LENGTH, None
    if stop:
        matcher = StopStringMatcher(TOKENIZER.token_bytes, stop)
        for n, token_id in enumerate(ids, start=1):
            if (found := matcher.push_id(token_id)) is not None:
                ids, matched_at = ids[:n], stop[found.stop_index]
                finish = FinishReason(type="stop", matched=matched_at)
                break
    result = "".join(streamed(ids, finish, stop=stop))
    assert result == at_once(ids, finish, stop=stop)
    assert not any(string in result for string in stop)
    assert text.startswith(result)
    if matched_at is None:
        assert result == text
    else:
        assert text.startswith(result + matched_at)


def test_possible_stop_string_prefix_is_held_back():
    text = OutputText(TOKENIZER, stop=["###"])
    assert text.push_ids(encode("a#")) == "a"
    assert text.push_ids(encode("#")) == ""
    assert text.push_ids(encode("b")) == "##b"
    assert text.push_ids(encode("#"), LENGTH) == "#"


def test_stop_string_may_match_a_hidden_special_token():
    ids = [*encode("the river"), END]
    finish = FinishReason(type="stop", matched="<|im_end|>")
    for skip in (True, False):
        options = {"stop": ["<|im_end|>"], "skip_special_tokens": skip}
        assert "".join(streamed(ids, finish, **options)) == at_once(ids, finish, **options) == "the river"


def test_stop_string_inside_hidden_special_token_shows_none_of_it():
    ids = [*encode("the"), END]
    finish = FinishReason(type="stop", matched="end|>")
    assert at_once(ids, finish, stop=["end|>"]) == "the"
    assert at_once(ids, finish, stop=["end|>"], skip_special_tokens=False) == "the<|im_"


def test_matched_stop_token_is_not_shown():
    river = encode(" river")[-1]
    ids = [*encode("the"), river]
    finish = FinishReason(type="stop", matched=river)
    assert at_once(ids, finish) == "the"
    assert at_once(ids, finish, no_stop_trim=True) == TOKENIZER.decode(ids)
    assert at_once(ids, LENGTH) == TOKENIZER.decode(ids)


def test_no_stop_trim_keeps_the_stop_string_and_holds_nothing_back():
    finish = FinishReason(type="stop", matched="###")
    assert streamed(encode("a"), LENGTH, stop=["ab"], no_stop_trim=True) == ["a"]
    assert "".join(streamed(encode("a###"), finish, stop=["###"], no_stop_trim=True)) == "a###"


def test_stop_match_within_min_new_tokens_stays_in_the_text():
    """A match within min_new_tokens is text; only the one that ended the output is cut."""
    ids = encode("a#b#")
    finish = FinishReason(type="stop", matched="#")
    assert "".join(streamed(ids, finish, stop=["#"])) == at_once(ids, finish, stop=["#"]) == "a#b"


def test_abort_flushes_partial_character():
    half = encode("龍")
    assert len(half) > 1
    assert at_once(half[:1], FinishReason(type="abort")) == "\ufffd"


def test_missing_matched_stop_string_is_an_error():
    with pytest.raises(ValueError, match="does not end in the last"):
        at_once(encode("the river"), FinishReason(type="stop", matched="x"), stop=["x"])


ITEM = FinishReason(type="stop", matched="item")


@pytest.mark.parametrize("text", ["ab the", "the item"])
@pytest.mark.parametrize("stop", [(), ("the item!",)])
def test_matched_item_is_shown_whole(text: str, stop: tuple[str, ...]) -> None:
    ids = encode(text)
    assert at_once(ids, ITEM, stop=stop) == text
    assert "".join(streamed(ids, ITEM, stop=stop)) == text


def test_stop_string_may_equal_the_item_marker() -> None:
    for text, shown in (("the item", "the "), ("the it", "the it")):
        assert at_once(encode(text), ITEM, stop=("item",)) == shown
        assert "".join(streamed(encode(text), ITEM, stop=("item",))) == shown
    assert at_once(encode("the item"), ITEM, stop=("item",), no_stop_trim=True) == "the item"


def test_the_match_of_a_regex_stays_in_the_text() -> None:
    """It may look like a stop string, and be among the tail that waits for one."""
    finish = FinishReason(type="stop", matched="#+")
    for stop in ((), ("####",), ("item", "##!")):
        assert at_once(encode("a ##"), finish, stop=stop) == "a ##"
        assert "".join(streamed(encode("a ##"), finish, stop=stop)) == "a ##"
        assert at_once(encode("an item"), FinishReason(type="stop", matched="it.m"), stop=stop) == "an item"
