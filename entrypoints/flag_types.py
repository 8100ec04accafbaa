"""Types of flags for argparse, shared by the programs beside the server.

parser.add_argument("--num-prompts", type=COUNT)

error: argument --num-prompts: 0 is not a whole number of at least 1
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Number = TypeVar("Number", int, float)


def number_type(kind: type[Number], check: Callable[[Number], bool], description: str) -> Callable[[str], Number]:
    """The type of a flag that takes numbers of this kind for which check is true. ``description`` completes the error
    "VALUE is not …"."""

    def read(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not check(value):
            raise argparse.ArgumentTypeError(f"{text} is not {description}")
        return value

    return read


COUNT = number_type(int, lambda value: value >= 1, "a whole number of at least 1")
WHOLE = number_type(int, lambda value: value >= 0, "a whole number of at least 0")
POSITIVE = number_type(float, lambda value: 0 < value < float("inf"), "a number above 0")
NOT_NEGATIVE = number_type(float, lambda value: 0 <= value < float("inf"), "a number of at least 0")
RATE = number_type(float, lambda value: value > 0, "a number above 0, or inf")
"""Per second; inf: everything at once."""
SHARE = number_type(float, lambda value: 0 <= value <= 1, "a share, 0 to 1")
SHARE_ABOVE_0 = number_type(float, lambda value: 0 < value <= 1, "a share above 0, and at most 1")


def file_refusal(path: Path) -> str | None:
    """Why a report cannot be written to this file, as far as that shows before an hour of work; None if nothing is
    wrong."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return "it is a folder; give the name of a file" if path.is_dir() else None
