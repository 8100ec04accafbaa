"""A text that is tokenised in pieces has the ids of the whole, or is said to be uncuttable."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from baton.runtime.text.prompt_tokenizer import CannotBeCut, TooManyTokens, encode_slices
from tests.doubles.trained_tokenizers import CORPUS, SPECIAL, byte_fallback, byte_level, unigram

TOY = Path(__file__).parents[3] / "examples" / "toy_model" / "tokenizer.json"
BACKENDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "unigram": unigram,
    "toy": lambda: tokenizers.Tokenizer.from_file(str(TOY)),
}


def in_pieces(backend: tokenizers.Tokenizer, text: str, slice_chars: int, max_tokens: int = 10**9) -> list[int]:
    steps = encode_slices(text, max_tokens, slice_chars)
    piece = next(steps)
    try:
        while True:
            assert len(piece) <= slice_chars
            piece = steps.send(backend.encode(piece, add_special_tokens=False))
    except StopIteration as end:
        return end.value


def random_text(rng: random.Random, size: int) -> str:
    """Words, runs of spaces and newlines, digits, special tokens, and letters of many scripts."""
    parts = ["".join(CORPUS[:3]).split(" "), [" ", "  ", "\n\n", " \n\t ", "1234567", "...", "e\u0301"], SPECIAL]
    weights = [12, 3, 1]
    text = ""
    while len(text) < size:
        text += rng.choice(rng.choices(parts, weights)[0]) + rng.choice(["", " ", " "])
    return text


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("seed", range(40))
def test_text_tokenised_in_pieces_has_ids_of_the_whole(name: str, seed: int) -> None:
    rng = random.Random(seed)
    backend, text = BACKENDS[name](), random_text(rng, rng.randrange(1, 4000))
    whole = backend.encode(text, add_special_tokens=False).ids
    try:
        assert in_pieces(backend, text, rng.choice([100, 333, 1000])) == whole, (name, seed)
    except CannotBeCut:
        assert not name.startswith("byte_level"), "such a text of short words can always be cut"


def test_words_longer_than_a_piece_cannot_be_cut() -> None:
    with pytest.raises(CannotBeCut):
        in_pieces(byte_level(), "x" * 1000, 100)
    assert in_pieces(byte_level(), "x" * 100, 100) == byte_level().encode("x" * 100).ids


def test_context_dependent_tokenizer_is_detected() -> None:
    """Here a piece begins with a space that the whole does not have."""
    backend = byte_level()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    text = "one,two,three,four,five," * 50
    with pytest.raises(CannotBeCut):
        in_pieces(backend, text, 100)


def test_tokenisation_stops_at_max_tokens() -> None:
    text = "word " * 100_000
    with pytest.raises(TooManyTokens):
        in_pieces(byte_level(), text, 1000, max_tokens=500)
