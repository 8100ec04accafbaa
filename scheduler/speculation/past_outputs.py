"""Recent outputs, by namespace: many requests repeat the same text, such as calls of the same tools.

Namespaces share nothing here either: the speed of a request would reveal the output of another.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from ..token_buffer import TokenBuffer
from .ngram_index import SIZES, NgramIndex

MAX_TOKENS = 1 << 15
"""Tokens kept of one namespace; beyond that the older half is forgotten."""

MAX_NAMESPACES = 16
"""Namespaces kept; the one without a new output for longest is forgotten first."""

SHORTEST = SIZES[1]
"""Fewer tokens in common say little about the output of another request."""

MIN_OUTPUT = 4
"""Shorter outputs are not kept."""

CONTEXT = SIZES[-1]
"""Tokens before an output that are kept with it, so that its first ones are found too."""

_END = np.full(1, -1, dtype=np.int32)
"""Separator between two outputs; no token id."""


class _Text:
    """The outputs of one namespace, one after the other."""

    def __init__(self) -> None:
        self.index = NgramIndex()
        self._ids = np.empty(4096, dtype=np.int32)
        self._length = 0

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: self._length]

    def add_ids(self, ids: np.ndarray) -> None:
        ids = np.concatenate([ids[-(MAX_TOKENS // 2) :], _END])
        if self._length + len(ids) > MAX_TOKENS:
            kept = self.ids[-(MAX_TOKENS // 2) :].copy()
            self._ids[: len(kept)], self._length, self.index = kept, len(kept), NgramIndex()
        if self._length + len(ids) > len(self._ids):
            grown = np.empty(2 * max(len(self._ids), len(ids)), dtype=np.int32)
            grown[: self._length] = self.ids
            self._ids = grown
        self._ids[self._length : self._length + len(ids)] = ids
        self._length += len(ids)
        self.index.update(self.ids)


class PastOutputs:
    """Owns the recent outputs of each namespace."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, _Text] = OrderedDict()

    def add_output(self, namespace: str, token_ids: TokenBuffer, prompt_len: int) -> None:
        """Add the output of an ended sequence, which begins after ``prompt_len`` tokens."""
        text = self._texts.setdefault(namespace, _Text())
        self._texts.move_to_end(namespace)
        text.add_ids(token_ids.view(max(0, prompt_len - CONTEXT)))
        if len(self._texts) > MAX_NAMESPACES:
            self._texts.popitem(last=False)

    def find_match(self, namespace: str, ids: np.ndarray, longer_than: int, most: int) -> tuple[int, np.ndarray]:
        """(length, tokens): the longest known n-gram at the end of ``ids``, int32 [n], and up to ``most`` tokens that
        followed it. (0, none) if it is not longer than ``longer_than``."""
        text = self._texts.get(namespace)
        if text is None:
            return 0, _END[:0]
        size, place = text.index.find_match(ids, text.ids, max(SHORTEST, longer_than + 1))
        followed = text.ids[place : place + most] if size else _END[:0]
        ends = np.flatnonzero(followed < 0)
        return size, followed[: ends[0]] if len(ends) else followed
