"""Drafts the tokens that may follow a sequence from text seen before, without a draft model.

    path      the whole sequence so far begins a path of the radix tree: what comes next there
    own       the last 8, 4 or 2 tokens stood before in prompt or output: what came next there
    past      the last 8 or 4 tokens stood in the output of an earlier request

Longer n-grams go first, and the sequence's own text before that of others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...radix.following import find_next_tokens
from ...radix.tree import RadixTree
from ..request import Request
from .ngram_index import SIZES
from .past_outputs import PastOutputs
from .sequence_drafts import SequenceDrafts, Source

GUESSED_RATES = {
    Source.OWN_2: 0.4,
    Source.OWN_4: 0.6,
    Source.OWN_8: 0.8,
    Source.PAST_4: 0.5,
    Source.PAST_8: 0.7,
    Source.PATH: 0.9,
}
"""Assumed rate of right tokens for each source, until there are measurements."""

_OWN = dict(zip(SIZES, (Source.OWN_2, Source.OWN_4, Source.OWN_8), strict=True))
_PAST = dict(zip(SIZES[1:], (Source.PAST_4, Source.PAST_8), strict=True))


@dataclass(slots=True)
class Draft:
    """Tokens that may follow a sequence."""

    source: Source
    tokens: np.ndarray
    """int32 [k], at least one; the sequence's end tokens are not among them."""


class Drafter:
    """Finds drafts. Owns the index of recent outputs."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self.past = PastOutputs()

    def find_draft(self, request: Request, memory: SequenceDrafts, skipped: int, most: int) -> Draft | None:
        """Find at most ``most`` tokens that may follow a running request's known tokens, after skipping the first
        ``skipped`` of them (still in flight). None if nothing is found."""
        ids = request.token_ids.view(0)
        draft = self._find(request, memory, ids, skipped + most)
        if draft is None:
            return None
        tokens = draft.tokens[skipped:]
        for place, token in enumerate(draft.tokens.tolist()):
            if token in memory.end_ids:  # no draft needed: the step that reaches it samples it
                tokens = draft.tokens[skipped:place]
                break
        return Draft(draft.source, tokens) if len(tokens) else None

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
