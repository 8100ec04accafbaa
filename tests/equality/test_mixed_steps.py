"""With mixed steps every request says what it says without them, token for token, whatever it asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.doubles.local_worker import LocalWorker
from tests.doubles.mixed_requests import assert_same_answers, mixed_requests, some_items

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
SEED = 9


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "chunked_prefill_size": 64},
        {"page_size": 16, "chunked_prefill_size": 33, "max_running_requests": 9, "overlap": True},
        {"page_size": 1, "max_total_tokens": 400, "max_running_requests": 20, "overlap": True},
    ],
    ids=str,
)
def test_mixed_steps_change_no_answer(options: dict[str, Any]) -> None:
    items = some_items(SEED)
    plain = LocalWorker(TOY, **{**options, "overlap": False})
    mixed = LocalWorker(TOY, enable_mixed_chunk=True, **options)
    kinds: set[tuple[bool, bool, bool]] = set()
    launch = mixed.step_runner.launch

    def watch(batch, previous, prepared=lambda: None):
        step = mixed.scheduler._in_flight[-1]
        if batch.is_extend and step.num_prompts < len(batch):
            drafted = batch.draft_lens if batch.draft_lens is not None else 0
            assert ((batch.extend_lens - drafted)[step.num_prompts :] == 1).all()
            kinds.add((bool((batch.input_ids < 0).any()), batch.allowed is not None, bool(batch.logprob_targets)))
        return launch(batch, previous, prepared)

    mixed.step_runner.launch = watch
    for worker in (plain, mixed):
        worker.scheduler._reserve._ratio = 0.0  # so that a small pool is over-committed
    expected, got = plain.run(mixed_requests(SEED), items=items), mixed.run(mixed_requests(SEED), items=items)
    assert_same_answers(mixed_requests(SEED), expected, got)
    late, constrained, scored = (any(wish) for wish in zip(*kinds, strict=True))
    assert late == mixed.overlap and constrained and scored, "mixed steps had all that"
    if options.get("max_total_tokens") == 400:
        assert mixed.scheduler.stats().retractions > 0, "the test needs pressure"
