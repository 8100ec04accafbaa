from __future__ import annotations

import numpy as np
import pytest

from baton.entrypoints.bench.load import arrivals
from baton.entrypoints.bench.prompts import WordCount, conversations, probe_sizes


def test_probes_tell_tokens_per_word_and_the_rest() -> None:
    words = WordCount.of((10, 35), (40, 110))
    assert words == WordCount(2.5, 10) == WordCount.of((40, 110), (10, 35))
    assert words.words_for(510) == 200 and words.words_for(500, first=False) == 200
    assert words.words_for(3) == 1, "no prompt is empty"


def test_probes_without_a_slope_are_refused() -> None:
    with pytest.raises(ValueError, match="counts 7 tokens for 4 words, and 7 for 16"):
        WordCount.of((4, 7), (16, 7))


@pytest.mark.parametrize("tokens", [1, 16, 100, 100_000])
def test_probes_are_short_and_differ(tokens: int) -> None:
    few, many = probe_sizes(tokens)
    assert 0 < few < many <= 256


def test_conversations_follow_their_seed() -> None:
    words = WordCount(2, 10)
    made = conversations((3, 1), 4, 3, 50, words)
    assert made == conversations((3, 1), 4, 3, 50, words)
    assert made != conversations((4, 1), 4, 3, 50, words) and made != conversations((3, 2), 4, 3, 50, words)
    assert len({text for texts in made for text in texts}) == 12
    for first, *later in made:
        assert len(first.split()) == 20 and all(len(text.split()) == 25 and text[0] == "\n" for text in later)


def test_arrivals_are_a_seeded_poisson_process() -> None:
    offsets = arrivals(4.0, 4001, seed=1)
    gaps = np.diff(offsets)
    assert offsets[0] == 0 and offsets == arrivals(4.0, 4001, seed=1) != arrivals(4.0, 4001, seed=2)
    # Exponential: mean and standard deviation are both 1 / rate.
    assert gaps.mean() == pytest.approx(0.25, rel=0.05) and gaps.std() == pytest.approx(0.25, rel=0.1)
    assert arrivals(float("inf"), 3, seed=1) == [0, 0, 0] and arrivals(1.0, 1, seed=1) == [0]
