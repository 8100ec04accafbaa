from __future__ import annotations

import numpy as np
import pytest

from benchmarks.cache.traces import NOWHERE, TRACES, Content, Request, Trace


def test_content_tree_maps_places_to_tokens() -> None:
    content = Content()
    top = content.add_tokens(NOWHERE, 3)
    left, right = content.add_tokens(top, 2), content.add_tokens(top, 1)
    assert content.token_ids(left).tolist() == [0, 1, 2, 3, 4]
    assert content.token_ids(right).tolist() == [0, 1, 2, 5]
    assert (content.lengths, content.sizes, list(content.path(right))) == ([3, 5, 4], [3, 2, 1], [right, top])


def test_working_set_counts_content_between_first_and_last_use() -> None:
    content = Content()
    kept, once = content.add_tokens(NOWHERE, 10), content.add_tokens(NOWHERE, 7)
    requests = [Request(place, place) for place in (kept, once, kept, once, kept, kept)]
    assert Trace("small", content, requests).working_set() == pytest.approx((10 * 5 + 7 * 2) / 6)
    assert Trace("small", content, requests).uses() == [[0, 2, 4, 5], [1, 3]]


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_deterministic_per_seed(name: str) -> None:
    one, same, other = TRACES[name](3, 200), TRACES[name](3, 200), TRACES[name](4, 200)
    assert one == same and one != other and len(one.requests) == 200
    shared = 0
    for request in one.requests:
        prompt, end = one.content.token_ids(request.prompt), one.content.token_ids(request.end)
        assert len(end) > len(prompt) and np.array_equal(end[: len(prompt)], prompt)
        assert request.no_reuse_from is None or request.no_reuse_from <= len(prompt)
        shared += len(one.uses()[request.prompt]) > 1
    assert shared or name in ("retrieval", "bursts")
    hinted = sum(request.is_last or request.no_reuse_from is not None for request in one.requests)
    assert 0 < hinted <= 200


def test_hinted_requests_are_never_reused() -> None:
    for name, make in TRACES.items():
        trace = make(1, 1500)
        last_use = [uses[-1] if uses else -1 for uses in trace.uses()]
        for number, request in enumerate(trace.requests):
            if request.is_last or request.no_reuse_from is not None:
                assert last_use[request.end] == number, name
