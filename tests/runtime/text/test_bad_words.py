"""Words to token sequences, with tokenizers of both families."""

from __future__ import annotations

import pytest

from baton.runtime.text.bad_words import MAX_BANNED_TOKENS, banned_sequences
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles import trained_tokenizers

BYTES = Tokenizer(trained_tokenizers.byte_level(), trained_tokenizers.CONFIG)
PIECES = Tokenizer(trained_tokenizers.byte_fallback(), trained_tokenizers.CONFIG)


def banned(tokenizer: Tokenizer, *words: str, vocab_size: int | None = None, **more) -> tuple[tuple[int, ...], ...]:
    return banned_sequences(tokenizer, SamplingParams(bad_words=words, **more), vocab_size or tokenizer.vocab_size)


def text_of(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    return b"".join(tokenizer.token_bytes[i] for i in ids).decode()


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte level", "sentencepiece"])
@pytest.mark.parametrize("word", ["the", "river", "quick brown", "naïve", "世界", "\n\n"])
def test_word_is_banned_with_and_without_leading_space(tokenizer: Tokenizer, word: str) -> None:
    """Without: as it stands in the middle of a text, where SentencePiece puts no space of its own."""
    found = banned(tokenizer, word)
    assert [text_of(tokenizer, ids) for ids in found] == [word, " " + word]
    assert banned(tokenizer, "   " + word) == found, "its own spaces do not count"
    assert banned(tokenizer, word, word) == found


def test_the_mid_text_tokens_of_a_word_are_banned() -> None:
    for word in ("river", "dog,", "世界"):
        said = BYTES.encode_continuation(f"over the {word}")
        assert tuple(said[-len(banned(BYTES, word)[1]) :]) == banned(BYTES, word)[1]


def test_special_token_is_banned_as_one_token() -> None:
    (alone, spaced) = banned(BYTES, "<|im_end|>")
    assert alone == (BYTES.token_to_id("<|im_end|>"),) and spaced[-1:] == alone


def test_words_outside_the_vocabulary_need_no_ban() -> None:
    think = BYTES.token_to_id("<think>")
    assert think is not None
    assert banned(BYTES, "<think>", "a", vocab_size=think) == banned(BYTES, "a")


def test_refusals() -> None:
    with pytest.raises(RequestRefused, match="not valid Unicode") as refusal:
        banned(BYTES, "a\ud800")
    assert refusal.value.param == "bad_words"
    rare = "\u0e01" * 700  # three bytes each, and no token for them together
    with pytest.raises(RequestRefused, match=rf"bad_words has [0-9]+ tokens.*at most {MAX_BANNED_TOKENS}"):
        banned(BYTES, rare)
    letters = [chr(i) for i in range(33, 127)]
    with pytest.raises(RequestRefused, match=r"can ban 9[0-9] of the model's 150 tokens at once"):
        banned(BYTES, *letters, vocab_size=150)
    assert len(banned(BYTES, *letters[:20], vocab_size=150)) >= 20
    ends = tuple(range(100, 180))
    with pytest.raises(RequestRefused, match="can ban"):
        banned(BYTES, *letters[:20], vocab_size=180, stop_token_ids=ends, min_new_tokens=1)
    assert banned(BYTES, *letters[:20], vocab_size=180, stop_token_ids=ends)
