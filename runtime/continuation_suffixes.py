"""The suffix of a continuation as token ids, where the border to the parent needs text.

A child continues what the client saw. If the parent's stop string began inside a token, the ids it inherits end before
that token, and what was visible of it, the rest, is put before the suffix; both are then tokenised as one:

    parent's tokens   | "I" | " am" | " done.\\n#" | "##" |      stop "\\n###"
    inherited ids     | "I" | " am" |      rest " done."
    suffix            tokenise(" done." + suffix text)

The text of parent and suffix is never joined otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .messages import Continuation
from .tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class _Suffix:
    parent: tuple[str, int]
    text: str | None
    ids: np.ndarray


class ContinuationSuffixes:
    """Owns the rests of finished parents, the ``max_rests`` newest, and the suffixes of open children."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], max_rests: int) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._max_rests = max_rests
        self._rests: OrderedDict[str, dict[int, str]] = OrderedDict()
        """By rid and index of the parent."""
        self._open: dict[str, _Suffix] = {}

    def remember(self, parent: tuple[str, int], rest: str) -> None:
        """A parent, by (rid, index), ended with text that its inherited ids leave out."""
        rid, index = parent
        self._rests.setdefault(rid, {})[index] = rest
        if len(self._rests) > self._max_rests:
            self._rests.popitem(last=False)

    def take_name(self, rid: str) -> None:
        """A new request has this rid: what was remembered of an earlier one goes."""
        self._rests.pop(rid, None)

    def open(self, rid: str, continuation: Continuation, ids: np.ndarray) -> np.ndarray:
        """A child arrived with the suffix ``ids`` (int32 [n]); returns what it appends to the parent's ids by now."""
        parent = (continuation.parent_rid, continuation.index)
        self._open[rid] = _Suffix(parent, continuation.suffix_text, ids)
        return self.ids(rid)

    def ids(self, child: str) -> np.ndarray:
        """int32 [n]: the suffix of an open child, with the rest of its parent if there is one."""
        suffix = self._open[child]
        rid, index = suffix.parent
        rest = self._rests.get(rid, {}).get(index)
        if not rest:
            return suffix.ids
        if suffix.text is not None:
            return self._encode(rest + suffix.text)
        return np.concatenate([self._encode(rest), suffix.ids])

    def close(self, rid: str) -> None:
        """A child ended; unknown ones are fine."""
        self._open.pop(rid, None)

    def _encode(self, text: str) -> np.ndarray:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
