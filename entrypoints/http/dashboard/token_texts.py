"""Texts of short token sequences, to show the contents of tree nodes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ....runtime.text.tokenizer import Tokenizer

MAX_KEPT = 8192
"""Texts in the cache: several times as many as one picture of the tree has."""


class TokenTexts:
    """Decodes token ids, with a cache. May be called from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decode = lru_cache(MAX_KEPT)(self._decoded)

    def __call__(self, ids: np.ndarray) -> str:
        """ids: int32 [n]. The text includes special tokens."""
        return self._decode(ids.tobytes())

    def _decoded(self, ids: bytes) -> str:
        known = [each for each in np.frombuffer(ids, dtype=np.int32).tolist() if 0 <= each < self._tokenizer.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=False)
