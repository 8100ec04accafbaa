"""What tests of continuation in the scheduler ask of a harness."""

from __future__ import annotations

import pytest

from baton.scheduler.request import Inheritance
from tests.doubles.scheduler_harness import Harness

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def inheritance(harness: Harness, rid: str, index: int = 0) -> Inheritance:
    request = harness.outcomes[rid, index].request
    assert request is not None and request.inheritance is not None
    return request.inheritance


def parent_ids(harness: Harness, rid: str, prompt: list[int], index: int = 0) -> list[int]:
    return prompt + harness.outcomes[rid, index].tokens


def evict_everything(harness: Harness) -> None:
    harness.cache.evict(10**9)
    assert harness.cache.evictable_tokens == 0


def without_a_lease(page_size: int) -> str:
    """The path of a short prompt whose lease is gone: the tree keeps no KV of a prompt that fills no page."""
    return "fallback" if page_size == 64 else "match"
