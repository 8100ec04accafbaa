from __future__ import annotations

import random

import numpy as np
import pytest

from baton.scheduler.speculation import ngram_index
from baton.scheduler.speculation.ngram_index import SIZES, NgramIndex
from tests.doubles.counted_lines import lines_run


def slow_find(text: list[int]) -> set[tuple[int, int]]:
    """(length, place) of the longest n-gram at the end that stood before, its last place."""
    for size in reversed(SIZES):
        tail = text[-size:]
        places = [at for at in range(size, len(text)) if text[at - size : at] == tail and len(tail) == size]
        if places:
            return {(size, places[-1])}
    return {(0, 0)}


@pytest.mark.parametrize("chunk", [1, 3, 40, 400])
def test_ngram_index_finds_last_occurrence_of_longest_ngram(chunk: int) -> None:
    """Token by token, or in bulk; hashes that collide may hide an n-gram, so not every one is found."""
    rng = random.Random(5)
    text = [rng.randrange(12) for _ in range(1200)]
    index, same = NgramIndex(), 0
    lengths = range(chunk, len(text) + 1, chunk)
    for length in lengths:
        ids = np.array(text[:length], dtype=np.int32)
        index.update(ids)
        size, place = index.find_match(ids, ids)
        assert size == 0 or text[place - size : place] == text[length - size : length], "a hit is compared"
        assert place < length, "something follows it"
        same += (size, place) in slow_find(text[:length])
    assert same >= 0.9 * len(lengths), (same, len(lengths))


def test_bulk_and_single_updates_fill_the_same_tables() -> None:
    text = np.random.default_rng(1).integers(-1, 30, 240).astype(np.int32)
    at_once, slowly = NgramIndex(), NgramIndex()
    at_once.update(text)
    for length in range(1, len(text) + 1):
        slowly.update(text[:length])
    assert np.array_equal(at_once._tables, slowly._tables) and at_once._tables.any()


def test_short_texts_match_nothing() -> None:
    for length in range(SIZES[0] + 1):
        index, text = NgramIndex(), np.zeros(length, dtype=np.int32)
        index.update(text)
        assert index.find_match(text, text) == (0, 0)


def test_find_match_respects_shortest_ngram() -> None:
    text = np.array([1, 2, 3, 4, 5, 6, 7, 8, 3, 4], dtype=np.int32)
    index = NgramIndex()
    index.update(text)
    assert index.find_match(text, text) == (2, 4)
    assert index.find_match(text, text, shortest=4) == (0, 0)


def test_ngram_index_cost_does_not_grow_with_text() -> None:
    """A prompt is indexed by numpy, a step takes a few lines, however long the text is."""
    text = np.random.default_rng(1).integers(0, 50_000, 100_200).astype(np.int32)

    def lines_of(length: int) -> list[int]:
        index = NgramIndex()

        def add(length: int) -> None:
            index.update(text[:length])
            index.find_match(text[:length], text[:length])

        return [lines_run(lambda n=n: add(n), ngram_index) for n in (length, *range(length + 1, length + 100))]

    short, long = lines_of(1000), lines_of(100_000)
    assert max(short[1:]) < 200 > max(long[1:]), "a step"
    assert short[0] < 300 > long[0], "a prompt"
