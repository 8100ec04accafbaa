"""Counts and sizes as text."""

from __future__ import annotations

import pytest

from baton.entrypoints.analyze.wording import counted, human_memory, human_size


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (0, "0 KiB"),
        (100, "0.0977 KiB"),
        (1024, "1 KiB"),
        (2**20 - 1024, "1,023 KiB"),
        (2**20, "1 MiB"),
        (2**30, "1 GiB"),
        (5 * 2**40, "5,120 GiB"),
    ],
)
def test_memory_is_said_in_the_largest_unit_that_fits(size: int, said: str) -> None:
    assert human_memory(size / 2**30) == said


def test_nouns_follow_their_number() -> None:
    assert counted(1, "request") == "1 request" and counted(0, "request") == "0 requests"
    assert human_size(1, None) == "1 token" and human_size(1234, 2.0) == "1,234 tokens, 2 GiB"
