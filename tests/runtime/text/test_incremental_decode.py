"""Oracle: the tokenizers library decoding all ids at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.runtime.text.incremental_decode import IncrementalDecoder, decode_all
from baton.runtime.text.token_bytes import TokenBytes, UnsupportedDecoder
from tests.doubles import trained_tokenizers

BYTE_LEVEL = trained_tokenizers.byte_level()
BYTE_FALLBACK = trained_tokenizers.byte_fallback()
UNIGRAM = trained_tokenizers.unigram()
BACKENDS = pytest.mark.parametrize(
    "backend", [BYTE_LEVEL, BYTE_FALLBACK, UNIGRAM], ids=["byte_level", "byte_fallback", "unigram"]
)
CHECKED = settings(deadline=None, derandomize=True, max_examples=150)

HARD_CHARACTERS = st.sampled_from(
    ["👨‍👩‍👧", "🏳️‍🌈", "é", "é", "你", "ﷺ", "‍", "\u200b", "क्षि", "🇩🇪", " ", "  ", "\n", "▁", "�"]
)
TEXTS = st.lists(HARD_CHARACTERS | st.text(max_size=8) | st.sampled_from(trained_tokenizers.CORPUS), max_size=8).map(
    "".join
)


def stream(token_bytes: TokenBytes, ids: list[int], skip: bool) -> list[str]:
    decoder = IncrementalDecoder(token_bytes, skip_special_tokens=skip)
    return [*(decoder.push_ids((i,)) for i in ids), decoder.flush()]


def whole(backend, ids: list[int], skip: bool) -> str:
    """All ids at once, in the middle of a text: a word goes before, so that no leading space is stripped."""
    anchor = backend.encode("the", add_special_tokens=False).ids
    before = backend.decode(anchor)
    text = backend.decode([*anchor, *ids], skip_special_tokens=skip)
    assert text.startswith(before)
    return text[len(before) :]


@BACKENDS
@given(text=TEXTS, skip=st.booleans())
@CHECKED
def test_streamed_text_equals_the_whole_text(backend, text, skip):
    ids = backend.encode(text, add_special_tokens=False).ids
    token_bytes = TokenBytes(backend)
    pieces = stream(token_bytes, ids, skip)
    assert "".join(pieces) == whole(backend, ids, skip)
    assert decode_all(token_bytes, ids, skip_special_tokens=skip) == "".join(pieces)
    if backend is not UNIGRAM and "\ufffd" not in text:  # Unigram without byte fallback loses unknown characters
        assert "\ufffd" not in "".join(pieces), "half a character was emitted"


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=60), skip=st.booleans())
@CHECKED
def test_byte_level_decoding_of_any_ids(ids, skip):
    """Invalid bytes, special tokens inside characters, ids beyond the vocabulary."""
    assert "".join(stream(TokenBytes(BYTE_LEVEL), ids, skip)) == whole(BYTE_LEVEL, ids, skip)


def byte_token(byte: int) -> int:
    token_id = BYTE_FALLBACK.token_to_id(f"<0x{byte:02X}>")
    assert token_id is not None
    return token_id


def replace_invalid_bytes(data: bytes) -> str:
    """Every valid character, and one U+FFFD for every other byte: found by trial."""
    text, i = "", 0
    while i < len(data):
        for length in (1, 2, 3, 4):
            try:
                text += data[i : i + length].decode()
                i += length
                break
            except UnicodeDecodeError:
                continue
        else:
            text += "\ufffd"
            i += 1
    return text


@given(runs=st.lists(st.binary(max_size=9) | HARD_CHARACTERS.map(str.encode), max_size=6))
@CHECKED
def test_byte_fallback_replaces_each_invalid_byte(runs):
    """Unlike the library, which replaces valid characters too when invalid bytes follow: they are sent already."""
    word = BYTE_FALLBACK.encode("the", add_special_tokens=False).ids
    ids, expected = [], ""
    for run in runs:
        ids += [byte_token(b) for b in run] + word
        expected += replace_invalid_bytes(run) + " the"
    assert "".join(stream(TokenBytes(BYTE_FALLBACK), ids, True)) == expected


def test_valid_byte_runs_equal_the_library():
    ids = [byte_token(b) for b in "你好👨‍👩‍👧".encode()]
    pieces = stream(TokenBytes(BYTE_FALLBACK), ids, True)
    assert "".join(pieces) == whole(BYTE_FALLBACK, ids, True) == "你好👨‍👩‍👧"
    assert [p for p in pieces if p] == list("你好👨‍👩‍👧"), "each character leaves with its last byte"


def test_incomplete_character_is_flushed_at_the_end():
    ids = [byte_token(b) for b in "é".encode()][:1]
    decoder = IncrementalDecoder(TokenBytes(BYTE_FALLBACK), skip_special_tokens=True)
    assert decoder.push_ids(ids) == ""
    assert decoder.has_pending_bytes
    assert decoder.flush() == "\ufffd"


def test_first_decoded_token_keeps_its_space():
    ids = UNIGRAM.encode("the river", add_special_tokens=False).ids
    assert decode_all(TokenBytes(UNIGRAM), ids, skip_special_tokens=True) == " the river"


@BACKENDS
def test_special_tokens_are_shown_or_skipped(backend):
    end = backend.token_to_id("<|im_end|>")
    assert decode_all(TokenBytes(backend), [end], skip_special_tokens=True) == ""
    assert decode_all(TokenBytes(backend), [end], skip_special_tokens=False) == "<|im_end|>"


def test_unsupported_decoders_are_refused():
    backend = trained_tokenizers.unigram()
    backend.decoder = trained_tokenizers.decoders.WordPiece()
    with pytest.raises(UnsupportedDecoder, match=r"WordPiece.*supported: ByteLevel"):
        TokenBytes(backend)
