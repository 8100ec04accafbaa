from __future__ import annotations

import numpy as np

from baton.scheduler.speculation.past_outputs import CONTEXT, MAX_NAMESPACES, MAX_TOKENS, SHORTEST, PastOutputs
from baton.scheduler.token_buffer import TokenBuffer


def said(past: PastOutputs, prompt: list[int], output: list[int], namespace: str = "") -> None:
    past.add_output(namespace, TokenBuffer(np.array(prompt + output, dtype=np.int32)), len(prompt))


def find(past: PastOutputs, ids: list[int], most: int = 9, namespace: str = "", longer_than: int = 0):
    size, tokens = past.find_match(namespace, np.array(ids, dtype=np.int32), longer_than, most)
    return size, tokens.tolist()


def test_what_followed_in_another_output() -> None:
    past = PastOutputs()
    said(past, [1, 2, 3], [10, 11, 12, 13, 14, 15])
    said(past, [1, 2, 3], [20, 21, 22, 23])
    assert find(past, [7, 10, 11, 12, 13]) == (4, [14, 15]), "not what the next output began with"
    assert find(past, [7, 10, 11, 12, 13], most=1) == (4, [14])
    assert find(past, [1, 2, 3, 20]) == (4, [21, 22, 23])
    assert find(past, [11, 12, 13])[0] == 0, "so few tokens say nothing of others"
    assert find(past, [7, 10, 11, 12, 13], longer_than=SHORTEST)[0] == 0
    assert find(past, [20, 21, 22, 23]) == (4, []), "it ended there"


def test_the_first_tokens_of_an_output_are_found_by_the_end_of_its_prompt() -> None:
    past = PastOutputs()
    said(past, list(range(100, 150)), [10, 11, 12, 13])
    assert find(past, list(range(150 - CONTEXT, 150))) == (8, [10, 11, 12, 13])
    assert find(past, list(range(100, 120)))[0] == 0, "the rest of the prompt is not kept"


def test_namespaces_share_nothing() -> None:
    past = PastOutputs()
    said(past, [], [1, 2, 3, 4, 5], "mine")
    assert find(past, [1, 2, 3, 4], namespace="mine") == (4, [5])
    assert find(past, [1, 2, 3, 4]) == find(past, [1, 2, 3, 4], namespace="yours") == (0, [])


def test_old_outputs_and_namespaces_are_forgotten() -> None:
    past = PastOutputs()
    said(past, [], [1, 2, 3, 4, 5], "old")
    said(past, [], [1, 2, 3, 4, 5])
    rng = np.random.default_rng(0)
    for _ in range(MAX_TOKENS // 1000 + 1):
        said(past, [], rng.integers(10, 5000, 1000).tolist())
    assert find(past, [1, 2, 3, 4])[0] == 0
    said(past, [], [1, 2, 3, 4, 6])
    assert find(past, [1, 2, 3, 4]) == (4, [6])
    assert len(past._texts[""].ids) <= MAX_TOKENS
    for number in range(MAX_NAMESPACES):
        said(past, [], [1, 2, 3, 4, 5], str(number))
    assert len(past._texts) == MAX_NAMESPACES
    assert find(past, [1, 2, 3, 4], namespace="old")[0] == 0


def test_an_output_longer_than_all_that_is_kept() -> None:
    past = PastOutputs()
    said(past, [], list(range(2 * MAX_TOKENS)))
    last = 2 * MAX_TOKENS - 1
    assert find(past, [last - 4, last - 3, last - 2, last - 1]) == (4, [last])
    assert len(past._texts[""].ids) <= MAX_TOKENS
