"""The overlapped loop says what the plain one says, token for token, whatever requests ask for; under pressure too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.local_worker import LocalWorker
from tests.doubles.mixed_requests import assert_same_answers, mixed_requests, some_items

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
SEED = 7


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1},
        {"page_size": 16, "chunked_prefill_size": 33},
        {"page_size": 64, "chunked_prefill_size": 64, "max_running_requests": 9},
        {"page_size": 1, "max_total_tokens": 400, "max_running_requests": 20},
        {"page_size": 16, "disable_radix_cache": True},
    ],
    ids=str,
)
def test_overlapped_loop_equals_plain_loop(options: dict[str, Any]) -> None:
    items = some_items(SEED)
    plain, overlapped = (LocalWorker(TOY, overlap=overlap, **options) for overlap in (False, True))
    for worker in (plain, overlapped):
        worker.scheduler._reserve._ratio = 0.0  # so that a small pool is over-committed
    expected, got = plain.run(mixed_requests(SEED), items=items), overlapped.run(mixed_requests(SEED), items=items)
    assert_same_answers(mixed_requests(SEED), expected, got)
    if options.get("max_total_tokens") == 400:
        assert overlapped.scheduler.stats().retractions > 0, "the test needs pressure"


def test_overlap_computes_no_extra_tokens_without_early_stops() -> None:
    """Each sequence costs prompt + output - 1 tokens: the step in flight is counted when the next one is formed."""
    worker = LocalWorker(TOY, overlap=True, disable_radix_cache=True)
    scheduled = 0
    launch = worker.step_runner.launch

    def count(batch, previous, prepared=lambda: None):
        nonlocal scheduled
        scheduled += int(batch.extend_lens.sum())
        return launch(batch, previous, prepared)

    worker.step_runner.launch = count
    lengths = [(3, 1), (20, 2), (70, 30), (41, 17)]
    prompts = [list(range(100, 100 + length)) for length, _ in lengths]
    worker.generate(
        prompts, [SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True) for _, new in lengths]
    )
    assert scheduled == sum(length + new - 1 for length, new in lengths)
