"""What is kept of tool calls: bounds, order, and the file."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from baton.scheduler.jobs.calls import MAX_NAME
from baton.scheduler.jobs.history import (
    LONGEST_S,
    MAX_BYTES,
    MAX_COMMANDS,
    MAX_OVERALL,
    MAX_PER_TOOL,
    MAX_TOOLS,
    PRIOR_EVERY,
    History,
    Ring,
)
from baton.scheduler.jobs.posterior import LogNormal


def test_ring_keeps_the_last_ones_in_order() -> None:
    ring = Ring(4)
    for number in range(4):
        ring.add(number)
        assert ring.seconds().tolist() == list(range(number + 1))
    ring.add(4.0)
    ring.add(5.0)
    assert ring.seconds().tolist() == [2.0, 3.0, 4.0, 5.0] and ring.count == 6


def test_a_flood_of_keys_stays_bounded() -> None:
    history = History(keep_commands=True)
    forgotten = 0
    for number in range(100_000):
        history.add("ls", "ls", 0.1) if number % 1000 == 0 else None
        forgotten += len(history.add(f"tool{number % 10_000}", f"run {number}", 1.0))
    assert len(history) == MAX_TOOLS and forgotten == 100_000 + 1 - MAX_TOOLS
    assert "ls" in history and "tool9999" in history and "tool0" not in history  # what is used stays
    assert len(history.seconds("ls")) == 100 and len(history.seconds("tool0")) == 0
    assert len(history.commands) == MAX_COMMANDS and history.commands[-1][0] == "run 99999"
    assert len(history.overall.seconds()) == MAX_OVERALL


def test_durations_of_a_key_are_bounded() -> None:
    history = History()
    for number in range(MAX_PER_TOOL + 10):
        assert history.add("ls", "ls", number) == []
    assert history.seconds("ls").tolist() == list(range(10, MAX_PER_TOOL + 10))
    assert not history.commands  # nobody asked for them


@pytest.mark.parametrize("wrong", [-0.001, float("nan"), float("inf"), 2 * LONGEST_S])
def test_impossible_durations_are_refused(wrong: float) -> None:
    history = History()
    with pytest.raises(ValueError, match="between 0 and"):
        history.add("ls", "ls", wrong)
    assert len(history) == history.overall.count == 0


def test_prior_follows_at_fixed_numbers_of_durations() -> None:
    history = History()
    seen = []
    for number in range(2 * PRIOR_EVERY + 1):
        history.add("ls", "ls", 0.1 * (number + 1))
        seen.append(history.prior)
    assert seen[0] == LogNormal.prior(np.array([0.1]))
    assert seen[PRIOR_EVERY - 1] is seen[2 * PRIOR_EVERY - 2] is not seen[2 * PRIOR_EVERY - 1] is seen[-1]
    assert seen[-1] == LogNormal.prior(history.overall.seconds()[: 2 * PRIOR_EVERY])


def filled() -> History:
    history = History(keep_commands=True)
    for number in range(300):
        history.add(f"tool{number % 7}", f'run "{number}" é\n', number / 7)
    history.add("tool0", "again", 0.0)
    return history


def test_save_and_load() -> None:
    saved = filled().save()
    loaded = History(keep_commands=True)
    loaded.add("old", "old", 1.0)
    loaded.load(saved)
    assert loaded.save() == saved and "old" not in loaded
    assert loaded.prior == LogNormal.prior(loaded.overall.seconds())
    assert loaded.seconds("tool1").tolist() == filled().seconds("tool1").tolist()
    without = History()
    without.load(saved)
    assert not without.commands and len(without) == 7


def test_order_of_use_survives_the_file() -> None:
    history = History()
    for number in range(MAX_TOOLS):
        history.add(f"tool{number}", "", 1.0)
    history.add("tool0", "", 1.0)
    loaded = History()
    loaded.load(history.save())
    assert loaded.add("new", "", 1.0) == ["tool1"]


def test_a_full_history_fits_its_own_file() -> None:
    history = History(keep_commands=True)
    for number in range(MAX_TOOLS * MAX_PER_TOOL):
        history.add(f"{number % MAX_TOOLS:0{MAX_NAME}}", "\x01" * 512, 1e8 / 3)
    saved = history.save()
    assert len(saved) < MAX_BYTES / 4
    History().load(saved)


GOOD: dict[str, object] = {"version": 1, "overall": [1.0], "tools": {"ls": [1.0]}, "commands": [["ls", 1.0]]}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"version": 2}, "of version 2: this is version 1"),
        ({"version": None}, r"version"),
        ({"overall": [-1.0]}, r">= 0.0 - at `\$.overall\[0\]`"),
        ({"overall": [2 * LONGEST_S]}, r"<= 1000000000.0"),
        ({"overall": [1.0] * (MAX_OVERALL + 1)}, "length <= 4096"),
        ({"overall": ["1"]}, r"Expected `float`, got `str`"),
        ({"tools": {"ls": []}}, "length >= 1"),
        ({"tools": {"ls": [1.0] * (MAX_PER_TOOL + 1)}}, "length <= 256"),
        ({"tools": {"x" * (MAX_NAME + 1): [1.0]}}, "length <= 128"),
        ({"tools": {str(number): [1.0] for number in range(MAX_TOOLS + 1)}}, "length <= 1024"),
        ({"tools": [1.0]}, r"Expected `object`, got `array` - at `\$.tools`"),
        ({"commands": [["x" * 513, 1.0]]}, "length <= 512"),
        ({"commands": [["ls"]]}, "length 2"),
        ({"commands": [["ls", 1.0]] * (MAX_COMMANDS + 1)}, "length <= 2048"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_damaged_files_are_refused(damage: dict[str, object], says: str) -> None:
    history = filled()
    before = history.save()
    with pytest.raises(ValueError, match=says):
        history.load(msgspec.json.encode({**GOOD, **damage}))
    assert history.save() == before


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"version": 1, "x": ' + b"[" * 100_000, b'{"version": 1}']
)
def test_what_is_no_history_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"no tool history: .*start without it"):
        History().load(data)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999", b"-0.5"])
def test_impossible_numbers_in_a_file_are_refused(number: bytes) -> None:
    with pytest.raises(ValueError, match="no tool history"):
        History().load(b'{"version": 1, "overall": [' + number + b'], "tools": {}, "commands": []}')


def test_files_beyond_all_bounds_are_not_read() -> None:
    with pytest.raises(ValueError, match="no more than"):
        History().load(b" " * (MAX_BYTES + 1))


def test_the_undamaged_file_is_read() -> None:
    history = History(keep_commands=True)
    history.load(msgspec.json.encode(GOOD))
    assert history.seconds("ls").tolist() == [1.0] and list(history.commands) == [("ls", 1.0)]
