"""Drafts the tokens that may follow a sequence from text seen before, without a draft model.

    path      the whole sequence so far begins a path of the radix tree: what comes next there
    own       the last 8, 4 or 2 tokens stood before in prompt or output: what came next there
    past      the last 8 or 4 tokens stood in the output of an earlier request
    forced    the request's constraint leaves no other text

Forced tokens go first. Longer n-grams go first, and the sequence's own text before that of others.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from ...radix.following import find_next_tokens
from ...radix.tree import RadixTree
from ..request import Request
from ..token_buffer import TokenBuffer
from .draft_length import KEPT, AcceptRate
from .ngram_index import SIZES, NgramIndex


class Source(IntEnum):
    """Source of a draft, with the number of tokens in common; each has an accept rate of its own."""

    OWN_2 = 0
    OWN_4 = 1
    OWN_8 = 2
    PAST_4 = 3
    PAST_8 = 4
    PATH = 5
    FORCED = 6


GUESSED_RATES = {
    Source.OWN_2: 0.4,
    Source.OWN_4: 0.6,
    Source.OWN_8: 0.8,
    Source.PAST_4: 0.5,
    Source.PAST_8: 0.7,
    Source.PATH: 0.9,
    Source.FORCED: 0.95,
}
"""Assumed rate of right tokens for each source, until there are measurements."""

_OWN = dict(zip(SIZES, (Source.OWN_2, Source.OWN_4, Source.OWN_8), strict=True))

_PAST = dict(zip(SIZES[1:], (Source.PAST_4, Source.PAST_8), strict=True))

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


@dataclass(slots=True)
class Draft:
    """Tokens that may follow a sequence."""

    source: Source
    tokens: np.ndarray
    """int32 [k], at least one; the sequence's end tokens are not among them."""


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


class Drafter:
    """Finds drafts. Owns the index of recent outputs."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self.past = PastOutputs()

    def find_draft(self, request: Request, memory: SequenceDrafts, skipped: int, most: int) -> Draft | None:
        """Find at most ``most`` tokens that may follow a running request's known tokens, after skipping the first
        ``skipped`` of them (still in flight). None if nothing is found."""
        draft = self._find(request, memory, request.token_ids.view(0), skipped + most)
        if draft is None:
            return None
        if request.constraint_state is not None:
            draft.tokens = draft.tokens[: request.constraint_state.count_allowed(draft.tokens)]
        return _behind(draft, memory.end_ids, skipped)

    def _find(self, request: Request, memory: SequenceDrafts, ids: np.ndarray, most: int) -> Draft | None:
        kv = request.held_kv
        if memory.on_path and kv.node is not None:
            followed = find_next_tokens(self._tree, kv.node, request.namespace, ids[kv.tree_len :], most)
            if followed is None:
                memory.on_path = False
            elif len(followed):
                return Draft(Source.PATH, followed)
        memory.index.update(ids)
        size, place = memory.index.find_match(ids, ids)
        past_size, followed = self.past.find_match(request.namespace, ids, size, most)
        if past_size and len(followed):
            return Draft(_PAST[past_size], followed)
        if not size:
            return None
        # The following tokens may reach the end of the text: repeat them then, as in a list of equal lines.
        followed = ids[place : place + most]
        return Draft(_OWN[size], followed if len(followed) == most else np.resize(followed, most))


def find_forced(request: Request, end_ids: frozenset[int], skipped: int, most: int) -> Draft | None:
    """As `Drafter.find_draft`: the tokens that the request's constraint forces."""
    if request.constraint_state is None:
        return None
    return _behind(Draft(Source.FORCED, request.constraint_state.forced()[: skipped + most]), end_ids, skipped)


def _behind(draft: Draft, end_ids: frozenset[int], skipped: int) -> Draft | None:
    """The draft behind its first ``skipped`` tokens, up to one that ends the sequence: the step that reaches it samples
    it. None if that is nothing."""
    ends = [place for place, token in enumerate(draft.tokens.tolist()) if token in end_ids]
    draft.tokens = draft.tokens[skipped : ends[0] if ends else len(draft.tokens)]
    return draft if len(draft.tokens) else None
