"""With speculation a server says what it says without, token for token, whatever requests ask for; under pressure, too.

Drafts come from the look-up itself, or from one that makes things up, or from one that has seen the answers.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.scheduler.request import Request
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.speculation.drafts import Draft, SequenceDrafts, Source
from tests.doubles.local_worker import Answer, LocalWorker
from tests.doubles.mixed_requests import assert_same_answers, mixed_requests, some_items

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
SEED = 11


class Prompter:
    """Knows what will be said: drafts are right up to the first of some mistakes."""

    def __init__(self, answers: dict[str, list[int]], mistakes: float) -> None:
        self._answers, self._mistakes = answers, mistakes
        self._rng = random.Random(SEED)

    def find_draft(self, request: Request, memory: SequenceDrafts, skipped: int, most: int) -> Draft | None:
        known = request.num_output_tokens
        tokens = self._answers[request.rid][known : known + skipped + most]
        tokens = [t if self._rng.random() >= self._mistakes else self._rng.randrange(1600) for t in tokens][skipped:]
        return Draft(Source.PATH, np.array(tokens, dtype=np.int32)) if tokens else None


def said(specs: list[RequestSpec], answers: list[Answer]) -> dict[str, list[int]]:
    return {spec.rid: answer.tokens for spec, answer in zip(specs, answers)}


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1},
        {"page_size": 16, "chunked_prefill_size": 33, "overlap": True},
        {"page_size": 64, "chunked_prefill_size": 64, "max_running_requests": 9},
        {"page_size": 1, "max_total_tokens": 400, "max_running_requests": 20},
        {"page_size": 16, "disable_radix_cache": True, "enable_mixed_chunk": True},
    ],
    ids=str,
)
def test_speculation_changes_no_output(options: dict[str, Any]) -> None:
    items, specs = some_items(SEED), mixed_requests(SEED)
    plain = LocalWorker(TOY, **{name: value for name, value in options.items() if name != "overlap"})
    expected = plain.run(specs, items=items)
    worker = LocalWorker(TOY, speculative_algorithm="NGRAM", **options)
    speculation = worker.scheduler._speculation
    for tokens in (1, 1000):  # so that drafts are worth it for many requests at once
        speculation._cost.record_step(tokens, 1.0)
    worker.scheduler._reserve._ratio = 0.0  # so that a small pool is over-committed
    assert_same_answers(specs, expected, worker.run(specs, items=items))
    assert speculation.counts.verified > 10, "the look-up itself has drafted, too"
    own, speculation._room = speculation._drafter, 1000
    for mistakes in (0.0, 0.2, 1.0):
        speculation._drafter = Prompter(said(specs, expected), mistakes)  # type: ignore[assignment]
        speculation._drafter.past = own.past
        before = speculation.counts.accepted
        assert_same_answers(specs, expected, worker.run(specs, items=items))
        accepted = speculation.counts.accepted - before
        assert accepted > 200 or mistakes, accepted
        assert accepted < 50 or mistakes < 1
    if options.get("max_total_tokens") == 400:
        assert worker.scheduler.stats().retractions > 0, "the test needs pressure"
