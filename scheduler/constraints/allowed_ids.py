"""Restricts an output to a list of token ids, as a constraint. It never ends an output, and does not depend on earlier
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..outcome import RequestRefused
from .constraint import AllowedTokens, join_allowed, walk_draft


class AllowedIds:
    """A `Constraint`; see there for the attributes."""

    name = "allowed_token_ids"
    output_name = "output"
    matched = ""
    eos_ends = True
    must_complete = False
    is_ready = True
    is_uniform = False
    min_tokens = 0
    max_tokens: int | None = None

    def __init__(self, ids: Sequence[int]) -> None:
        tokens = np.unique(np.array(ids, dtype=np.int32))
        self._state = AllowedIdsState(AllowedTokens.pack(np.zeros_like(tokens), tokens), len(tokens))

    def failure(self) -> None:
        return None

    def start(self) -> AllowedIdsState:
        return self._state


@dataclass(slots=True, frozen=True)
class AllowedIdsState:
    """A `ConstraintState`, of one sequence: a beam search has none."""

    packed: AllowedTokens
    count: int

    def __len__(self) -> int:
        return 1

    def allowed(self) -> AllowedTokens:
        return self.packed

    def num_allowed(self) -> np.ndarray:
        return np.array([self.count])

    def select(self, sequences: np.ndarray) -> AllowedIdsState:
        assert sequences.tolist() == [0]
        return self

    def advance(self, tokens: np.ndarray) -> AllowedIdsState:
        return self

    def at_end(self) -> np.ndarray:
        return np.zeros(1, dtype=bool)

    def forced(self) -> np.ndarray:
        return np.empty(0, dtype=np.int32)

    def count_allowed(self, draft: np.ndarray) -> int:
        wrong = np.flatnonzero(~self.packed.holds(np.zeros_like(draft), draft))
        return int(wrong[0]) if len(wrong) else len(draft)

    @classmethod
    def allowed_next(cls, states: Sequence[Any]) -> AllowedTokens:
        return join_allowed(states)

    @classmethod
    def allowed_along(cls, states: Sequence[Any], drafts: Sequence[np.ndarray]) -> list[AllowedTokens | RequestRefused]:
        return [walk_draft(state, draft) for state, draft in zip(states, drafts, strict=True)]
