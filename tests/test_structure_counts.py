"""Bounds for what keeps the code searchable; tests/structure_counts.py says how each is counted."""

from __future__ import annotations

import ast

import pytest

from tests.structure_counts import (
    ROOT,
    Source,
    callbacks_of_pure_layers,
    methods_by_name,
    reaches_through_the_scheduler,
    reading_list,
    sources,
    unclear_docstrings,
)

FREE_NAMES = {"checkpoint_views", "close", "run"}  # the first: one method of every layer, and it names its object


@pytest.fixture(scope="module")
def files() -> list[Source]:
    return sources()


def test_only_public_scheduler_methods_are_called(files: list[Source]) -> None:
    assert not reaches_through_the_scheduler(files)


def test_frequent_method_names_carry_their_object(files: list[Source]) -> None:
    counts = methods_by_name(files)
    frequent = {name: count for name, count in counts.items() if count > 10 and name not in FREE_NAMES}
    assert not {name: count for name, count in frequent.items() if name != "add" or count > 15}


def test_tour_reading_list_names_existing_files() -> None:
    way = reading_list()
    assert way and len(set(way)) == len(way)
    assert not [path for path in way if not (ROOT / path).is_file()]


def test_structure_counts_match_a_known_file() -> None:
    """On a file of which every count is known."""
    text = '''
class Part:
    """Of a part."""

    def __init__(self, tell: Callable[[int], None], size: int) -> None:
        """Tells somebody."""

    def add(self) -> None:
        """Add a page to the pool."""
        self.scheduler.tiers.take()
        scheduler._decode = self
'''
    pure = Source("scheduler/part.py", text, ast.parse(text))
    above = Source("runtime/part.py", text, ast.parse(text))
    assert callbacks_of_pure_layers([pure, above]) == ["scheduler/part.py:5: Part(tell)"]
    assert reaches_through_the_scheduler([pure, above]) == [
        "runtime/part.py:10: self.scheduler.tiers.take()",
        "runtime/part.py:11: scheduler._decode = self",
    ]
    assert methods_by_name([pure, above]) == {"add": 2}
    assert [line.split(": ")[1] for line in unclear_docstrings([pure])] == ["Of a part.", "Tells somebody."]
