"""Errors of code that is compiled, or written by others, in one line for a log."""

from __future__ import annotations

MAX_CHARACTERS = 200


def describe_error(error: BaseException) -> str:
    """The type and the first line of an error: compilers write pages, and some errors say nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:MAX_CHARACTERS]
