"""A token that a request does not allow ends that request with a 500; everybody else of the batch says what it would
have said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton.entrypoints.http_statuses import status_of
from baton.scheduler.constraints.item_trie import ItemTrie
from baton.scheduler.outcome import RequestRefused
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness

TRIE = ItemTrie.build(np.array([(5, 6, 7), (5, 8, 9)], dtype=np.int32))


@pytest.mark.parametrize("depth", [1, 2], ids=["plain", "overlapped"])
@pytest.mark.parametrize(
    "wish", [{"trie": TRIE}, {"allowed_token_ids": (5, 6)}, {"trie": TRIE, "beam_width": 2}, {"n": 3}]
)
@pytest.mark.parametrize(
    ("cause", "code"), [("forbidden_rows", "token_not_allowed"), ("unchecked_rows", "stop_check_failed")]
)
@PAGES
def test_forbidden_token_ends_only_its_request(
    page_size: int, cause: str, code: str, wish: dict[str, Any], depth: int
) -> None:
    harness = Harness(page_size=page_size, depth=depth, num_tokens=1024)
    prompts = {rid: prompt_of(70, seed) for seed, rid in enumerate(("before", "bad", "after"))}
    harness.add("before", prompts["before"], 12)
    harness.add("bad", prompts["bad"], 6, retain_ttl=60.0, **wish)
    harness.add("after", prompts["after"], 12)
    harness.continue_from("bad", "child", [1, 2])
    process = harness.scheduler.process_result
    hit: list[int] = []

    def with_a_wrong_token(result: Any, now: float) -> Any:
        rows = [row for row, request in enumerate(harness.scheduler._in_flight[0].requests) if request.rid == "bad"]
        if result.counts.sum() or result.beams:
            wrong = tuple(rows[-1:]) if not wish.get("beam_width") else tuple(rows)
            setattr(result, cause, wrong)
            hit.extend(wrong)
        return process(result, now)

    harness.scheduler.process_result = with_a_wrong_token  # type: ignore[method-assign]
    harness.run()
    assert hit
    for (rid, _), outcome in harness.outcomes.items():
        if rid in ("before", "after"):
            assert outcome.tokens == expected_output(prompts[rid], 12, frozenset())
        elif rid == "bad":
            assert isinstance(outcome.refusal, RequestRefused) and outcome.refusal.code == code
            assert status_of(outcome.refusal) == 500 and outcome.finish is not None and outcome.finish.type == "abort"
        else:
            assert outcome.refusal is not None and outcome.refusal.code == "parent_failed"
    assert harness.cache.protected_tokens == 0, "nothing is leased"
