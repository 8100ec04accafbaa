"""Decodes token ids to text as they arrive.

Only whole characters come out; bytes of an unfinished one wait for the next token. Each token costs constant work. All
pushes together give the text of all ids decoded at once, so a streamed answer equals one sent at its end.

    pushes      [.. "caf"]   [C3]        [A9 " a"]      flush
    text out        "caf"    ""          "é a"          ""        (bytes that never became a character: U+FFFD)

Decoding starts as if in mid-sentence: generated text continues a prompt, so a SentencePiece token at its start
keeps its space (as in SGLang and vLLM).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from .token_bytes import TokenBytes

_UTF8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Decodes one sequence. ``skip_special_tokens``: special tokens leave no text."""

    __slots__ = ("_skipped", "_token_bytes", "_utf8")

    def __init__(self, token_bytes: TokenBytes, *, skip_special_tokens: bool) -> None:
        self._token_bytes = token_bytes
        self._skipped = token_bytes.special_ids if skip_special_tokens else frozenset()
        self._utf8 = _UTF8(token_bytes.errors)

    def push_ids(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; Python ints, one or many."""
        token_bytes, skipped = self._token_bytes, self._skipped
        return self._utf8.decode(b"".join([token_bytes[i] for i in token_ids if i not in skipped]))

    def copy(self) -> IncrementalDecoder:
        """Another decoder in the same state, to be continued with other tokens."""
        other = IncrementalDecoder.__new__(IncrementalDecoder)
        other._token_bytes, other._skipped = self._token_bytes, self._skipped
        other._utf8 = _UTF8(self._token_bytes.errors)
        other._utf8.setstate(self._utf8.getstate())
        return other

    def flush(self) -> str:
        """The end of the sequence: U+FFFD for bytes still waiting, else nothing."""
        return self._utf8.decode(b"", final=True)

    @property
    def has_pending_bytes(self) -> bool:
        """True when the tokens so far end within a character."""
        return bool(self._utf8.getstate()[0])


def decode_all(token_bytes: TokenBytes, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
    """The text of a whole sequence of generated tokens: the same as pushing them one by one and a flush."""
    decoder = IncrementalDecoder(token_bytes, skip_special_tokens=skip_special_tokens)
    return decoder.push_ids(token_ids) + decoder.flush()
