"""Errors in one line."""

from __future__ import annotations

import pytest

from baton.attention.error_text import MAX_CHARACTERS, describe_error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(), "RuntimeError"),
        (ValueError(" \n"), "ValueError"),
        (KeyError("a"), "KeyError: 'a'"),
        (TypeError("\n  first \nsecond"), "TypeError: first"),
    ],
)
def test_error_is_its_type_and_first_line(error: Exception, expected: str) -> None:
    assert describe_error(error) == expected


def test_long_lines_are_cut() -> None:
    assert len(describe_error(RuntimeError("x" * 10_000))) == MAX_CHARACTERS
