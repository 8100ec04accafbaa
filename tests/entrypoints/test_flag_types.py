"""Types of numeric flags: which texts they take, and their errors."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from baton.entrypoints.flag_types import COUNT, NOT_NEGATIVE, POSITIVE, RATE, SHARE, SHARE_ABOVE_0, WHOLE


@pytest.mark.parametrize(
    ("kind", "taken", "refused"),
    [
        (COUNT, ["1", "10"], ["0", "-1", "1.5", "1e3", "x", ""]),
        (WHOLE, ["0", "1"], ["-1", "0.5", "nan", ""]),
        (POSITIVE, ["0.001", "1e3"], ["0", "-1", "inf", "nan", "x"]),
        (NOT_NEGATIVE, ["0", "0.5"], ["-0.1", "inf", "nan", "x"]),
        (RATE, ["0.5", "inf"], ["0", "-1", "-inf", "nan", "x"]),
        (SHARE, ["0", "0.5", "1"], ["-0.1", "1.1", "inf", "nan", "x"]),
        (SHARE_ABOVE_0, ["0.1", "1"], ["0", "1.1", "nan", "x"]),
    ],
)
def test_numbers_in_range_are_taken(kind: Callable[[str], float], taken: list[str], refused: list[str]) -> None:
    assert [kind(text) for text in taken] == [float(text) for text in taken]
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError, match=f"^{text} is not a "):
            kind(text)


def test_whole_numbers_stay_integers() -> None:
    assert isinstance(COUNT("3"), int) and isinstance(WHOLE("0"), int)
    assert isinstance(POSITIVE("3"), float)


def test_error_names_the_flag_the_value_and_the_range(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=WHOLE)
    with pytest.raises(SystemExit):
        parser.parse_args(["--seeds", "-1.5"])
    assert "argument --seeds: -1.5 is not a whole number of at least 0" in capsys.readouterr().err
