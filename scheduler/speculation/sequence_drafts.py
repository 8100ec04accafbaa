"""State of one sequence's drafts: their sources, and how often each was right."""

from __future__ import annotations

from enum import IntEnum

from .draft_length import KEPT, AcceptRate
from .ngram_index import NgramIndex


class Source(IntEnum):
    """Source of a draft, with the number of tokens in common; each has an accept rate of its own."""

    OWN_2 = 0
    OWN_4 = 1
    OWN_8 = 2
    PAST_4 = 3
    PAST_8 = 4
    PATH = 5


class SequenceDrafts:
    """The n-gram index of one sequence, and the accept rates of its drafts."""

    __slots__ = ("end_ids", "index", "on_path", "rates", "source")

    def __init__(self, end_ids: frozenset[int]) -> None:
        """end_ids: tokens that end the sequence."""
        self.end_ids = end_ids
        self.index = NgramIndex()
        self.on_path = True
        """False once its tokens have left every path of the tree."""
        self.rates = [AcceptRate(KEPT) for _ in Source]
        self.source = Source.PATH
        """Source of the draft in flight."""
