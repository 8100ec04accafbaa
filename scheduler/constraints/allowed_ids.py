"""Restricts an output to a list of token ids, as a constraint. It never ends an output, and does not depend on earlier
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .constraint import AllowedTokens


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

    @classmethod
    def prepare(cls, states: Sequence[Any]) -> None:
        pass
