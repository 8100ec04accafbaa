"""Turns a continuation's suffix into token ids where its parent ended inside a token.

A child continues what the client saw. If the parent's stop string began inside a token, the child inherits only the ids
before that token. The visible part of the token, the tail, goes before the suffix, and both are tokenised as one:

    parent's tokens   | "I" | " am" | " done.\\n#" | "##" |      stop "\\n###"
    inherited ids     | "I" | " am" |      tail " done."
    suffix            tokenise(" done." + suffix text)

Otherwise the texts of parent and suffix are never joined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...scheduler.request_spec import ContinuationSpec
from .tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class _Suffix:
    continuation: ContinuationSpec
    ids: np.ndarray


class ContinuationSuffixes:
    """Owns the tails of finished parents and the suffixes of open children."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], max_tails: int) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._max_tails = max_tails
        self._tails: dict[str, dict[int, str]] = {}
        """By rid and index of the parent."""
        self._open: dict[str, _Suffix] = {}

    def remember_tail(self, parent: tuple[str, int], tail: str) -> None:
        """Record the tail of a parent (rid, index): the text that its inherited ids leave out."""
        rid, index = parent
        self._tails.setdefault(rid, {})[index] = tail

    def prune_tails(self, is_on_record: Callable[[str], bool]) -> None:
        """Once there are many tails, drop those of parents that can no longer be continued."""
        if len(self._tails) > 2 * self._max_tails:
            self._tails = {rid: tails for rid, tails in self._tails.items() if is_on_record(rid)}

    def forget_tails(self, rid: str) -> None:
        """Forget the tails of an earlier request with this rid, which a new request has now."""
        self._tails.pop(rid, None)

    def open_suffix(self, rid: str, continuation: ContinuationSpec, ids: np.ndarray) -> None:
        """Keep the suffix of an accepted child; ``ids`` is int32 [n]."""
        self._open[rid] = _Suffix(continuation, ids)

    def suffix_ids(self, child: str) -> np.ndarray:
        """int32 [n]: the current suffix of an open child."""
        suffix = self._open[child]
        return self.complete_suffix(suffix.continuation, suffix.ids)

    def complete_suffix(self, continuation: ContinuationSpec, ids: np.ndarray) -> np.ndarray:
        """int32 [n]: the suffix ``ids`` of a request, after the tail of its parent if there is one."""
        tail = self._tails.get(continuation.parent_rid, {}).get(continuation.index)
        if not tail:
            return ids
        if continuation.suffix_text is not None:
            return self._encode(tail + continuation.suffix_text)
        return np.concatenate([self._encode(tail), ids])

    def close_suffix(self, rid: str) -> None:
        """Forget a child that has ended; unknown ones are fine."""
        self._open.pop(rid, None)

    def _encode(self, text: str) -> np.ndarray:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return np.array(self._tokenizer.encode_continuation(text), dtype=np.int32)
