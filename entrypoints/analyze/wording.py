"""Counts and sizes as text."""

from __future__ import annotations

_UNITS = ("GiB", "MiB", "KiB")


def counted(number: int, noun: str) -> str:
    """The number with its noun, which takes an s in the plural."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def human_size(tokens: int | None, gib: float | None) -> str:
    """The size in tokens, and in bytes if that is known."""
    if tokens is None:
        return "-"
    return counted(tokens, "token") if gib is None else f"{counted(tokens, 'token')}, {human_memory(gib)}"


def human_memory(gib: float) -> str:
    """In the largest unit of which there is at least one, down to KiB."""
    power = next((power for power in range(len(_UNITS)) if gib * 1024**power >= 1), len(_UNITS) - 1)
    size = gib * 1024**power
    return f"{size:{',.0f' if size >= 100 else '.3g'}} {_UNITS[power]}"
