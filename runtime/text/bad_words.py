"""Token sequences that ``bad_words`` ban: those of each word, with and without a space before it."""

from __future__ import annotations

from collections.abc import Sequence

from ...scheduler.outcome import RequestRefused
from ...scheduler.sampling_params import SamplingParams
from .tokenizer import Tokenizer

MAX_BANNED_TOKENS = 4096
"""Limit for all sequences of a request together."""


def banned_sequences(tokenizer: Tokenizer, sampling: SamplingParams, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each sequence once, in the order of the words. Raises RequestRefused.

    A word's own leading spaces do not count. A space that the tokenizer puts before the first word of a text is left
    out, as an output continues a text. Sequences with an id outside the vocabulary are left out, as no output has it.
    """
    words = [word.lstrip(" ") for word in sampling.bad_words]
    try:
        found = tokenizer.encode_continuation_batch([space + word for word in words for space in ("", " ")])
    except (UnicodeEncodeError, TypeError) as error:
        raise _refused(f"bad_words is not valid Unicode: {error}") from None
    sequences = tuple(dict.fromkeys(tuple(ids) for ids in found if ids and max(ids) < vocab_size))
    if (total := sum(map(len, sequences))) > MAX_BANNED_TOKENS:
        raise _refused(
            f"bad_words has {total} tokens, counted with and without a space; use at most {MAX_BANNED_TOKENS}"
        )
    _check_choice(sequences, sampling, vocab_size)
    return sequences


def _check_choice(sequences: Sequence[tuple[int, ...]], sampling: SamplingParams, vocab_size: int) -> None:
    """A token must be left to sample, whatever came before."""
    last = {sequence[-1] for sequence in sequences}
    if sampling.min_new_tokens > 0:
        last.update(sampling.stop_token_ids)
    if len(last) > vocab_size // 2:
        raise _refused(f"bad_words can ban {len(last)} of the model's {vocab_size} tokens at once; use fewer words")


def _refused(message: str) -> RequestRefused:
    return RequestRefused(message, param="bad_words")
