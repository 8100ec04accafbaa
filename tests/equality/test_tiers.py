"""What came back from the host says what was computed, token for token, whatever had pushed it off the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_worker import LocalWorker
from mixed_requests import assert_same_answers, mixed_requests, some_items

from baton.runtime.config import TierConfig
from baton.scheduler.sampling_params import SamplingParams

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
SEED = 17


def flood(worker: LocalWorker, tokens: int, first: int) -> None:
    """Prompts that nobody has sent before, until they have taken the whole pool."""
    rng = np.random.default_rng(first)
    for _ in range(0, tokens, 150):
        worker.generate([rng.integers(5, 200, 150).tolist()], SamplingParams(max_new_tokens=1, temperature=0.0))


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "max_total_tokens": 800},
        {"page_size": 16, "max_total_tokens": 800, "overlap": True, "chunked_prefill_size": 33},
        {"page_size": 64, "max_total_tokens": 1280, "enable_mixed_chunk": True},
    ],
    ids=str,
)
def test_a_flood_between_turns_changes_no_answer(options: dict[str, Any], policy: Any) -> None:
    items = some_items(SEED)
    selective = policy == "write_through_selective"
    if selective:  # what is not hit before it goes is not stored
        options = {**options, "max_total_tokens": 8 * options["max_total_tokens"]}
    plain = LocalWorker(TOY, disable_radix_cache=True)
    tiers = LocalWorker(TOY, tiers=TierConfig(host_cache_ratio=4.0, host_write_policy=policy), **options)
    tier = tiers.scheduler._memory.tier
    assert tier is not None
    expected = plain.run(mixed_requests(SEED), items=items)
    for turn in range(3):
        for _ in range(2 if selective else 1):
            got = tiers.run(mixed_requests(SEED), items=items)
            assert_same_answers(mixed_requests(SEED), expected, got)
            tiers.end_copies()
        flood(tiers, options["max_total_tokens"], turn)
    assert tier.counts.loaded > 300 and tier.counts.failed_loads == 0, tier.counts


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_new_server_says_the_same_from_disk(page_size: int, tmp_path: Path) -> None:
    """The second worker finds what the first has left; the third, with the dtype changed, must not."""
    tiers = TierConfig(host_cache_gb=0.05, disk_cache_path=str(tmp_path), disk_cache_gb=0.5)
    rng = np.random.default_rng(SEED)
    prompts = [rng.integers(5, 1600, count).tolist() for count in (700, 300, 129)]
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0)
    found: list[list[tuple[int, int]]] = []
    answers = []
    for options in ({}, {}, {"model_options": {"dtype": "float16"}}):
        worker = LocalWorker(TOY, tiers=tiers, page_size=page_size, **options)
        got = worker.generate(prompts, sampling)
        worker.end_copies()
        answers.append([answer.tokens for answer in got])
        found.append([(answer.cached_tokens, answer.found.disk) for answer in got])
        worker.close()
    assert answers[0] == answers[1]
    assert found[0] == found[2] == [(0, 0)] * 3
    assert found[1] == [(640, 640), (256, 256), (128, 128)]
