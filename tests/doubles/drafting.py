"""Drafters that know, or make up, what comes next, in place of the one that looks it up."""

from __future__ import annotations

import random

import numpy as np

from baton.scheduler.request import Request
from baton.scheduler.speculation.drafts import Draft, SequenceDrafts, Source
from tests.doubles.kv_echo import VOCAB, expected_output


class EchoDrafter:
    """Drafts of any length up to what is asked for; each begins with what the KV-echo model will say, for some tokens.
    right: the share of drafts that are right all through. stateful: the model has recurrent states.
    reach: of its windows, 0 for none."""

    def __init__(self, rng: random.Random, right: float, stateful: bool = False, reach: int = 0) -> None:
        self._rng, self._right, self._stateful, self._reach = rng, right, stateful, reach
        self.drafts = 0

    def find_draft(self, request: Request, memory: SequenceDrafts, skipped: int, most: int) -> Draft | None:
        rng, length = self._rng, skipped + self._rng.randrange(0, most + 1)
        known = request.token_ids.view().tolist()
        right = length if rng.random() < self._right else rng.randrange(length + 1)
        tokens = expected_output(known, right, stateful=self._stateful, reach=self._reach) + [
            rng.randrange(VOCAB) for _ in range(length - right)
        ]
        tokens = tokens[skipped:]
        self.drafts += bool(tokens)
        return Draft(rng.choice(list(Source)), np.array(tokens, dtype=np.int32)) if tokens else None


def draft_by_echo(
    speculation: object, rng: random.Random, right: float, stateful: bool = False, reach: int = 0
) -> EchoDrafter:
    """Have a scheduler's speculation draft so, and as much as it may: its steps cost nothing more."""
    drafter = EchoDrafter(rng, right, stateful, reach)
    drafter.past = speculation._drafter.past  # type: ignore[attr-defined]
    speculation._drafter = drafter  # type: ignore[attr-defined]
    return drafter
