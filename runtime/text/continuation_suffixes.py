"""The suffix of a continuation as token ids, where the border to the parent needs text.

A child continues what the client saw. If the parent's stop string began inside a token, the ids it inherits end before
that token, and what was visible of it, the tail, is put before the suffix; both are then tokenised as one:

    parent's tokens   | "I" | " am" | " done.\\n#" | "##" |      stop "\\n###"
    inherited ids     | "I" | " am" |      tail " done."
    suffix            tokenise(" done." + suffix text)

The text of parent and suffix is never joined otherwise.
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

    def remember(self, parent: tuple[str, int], tail: str) -> None:
        """A parent, by (rid, index), ends with text that its inherited ids leave out."""
        rid, index = parent
        self._tails.setdefault(rid, {})[index] = tail

    def prune(self, is_on_record: Callable[[str], bool]) -> None:
        """Forget the tails of parents that nobody can name any more, once there are many."""
        if len(self._tails) > 2 * self._max_tails:
            self._tails = {rid: tails for rid, tails in self._tails.items() if is_on_record(rid)}

    def take_name(self, rid: str) -> None:
        """A new request has this rid: what was remembered of an earlier one goes."""
        self._tails.pop(rid, None)

    def open(self, rid: str, continuation: ContinuationSpec, ids: np.ndarray) -> None:
        """A child was taken with the suffix ``ids`` (int32 [n])."""
        self._open[rid] = _Suffix(continuation, ids)

    def ids(self, child: str) -> np.ndarray:
        """int32 [n]: the suffix of an open child as it is by now."""
        suffix = self._open[child]
        return self.complete(suffix.continuation, suffix.ids)

    def complete(self, continuation: ContinuationSpec, ids: np.ndarray) -> np.ndarray:
        """int32 [n]: a suffix that came as ``ids``, with the tail of its parent if there is one."""
        tail = self._tails.get(continuation.parent_rid, {}).get(continuation.index)
        if not tail:
            return ids
        if continuation.suffix_text is not None:
            return self._encode(tail + continuation.suffix_text)
        return np.concatenate([self._encode(tail), ids])

    def close(self, rid: str) -> None:
        """A child ended; unknown ones are fine."""
        self._open.pop(rid, None)

    def _encode(self, text: str) -> np.ndarray:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return np.array(self._tokenizer.encode_continuation(text), dtype=np.int32)
