"""Large answers are the same JSON, piece by piece."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from http_calls import generate
from server_under_test import ServerUnderTest

from baton.entrypoints.http.wire.large_json import encode_pieces


def random_content(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 4)
    if kind == 4:
        return {rng.choice('abcé"') + str(i): random_content(rng, depth - 1) for i in range(rng.randrange(4))}
    if kind == 5:
        return [random_content(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return [[rng.random(), rng.randrange(9), None] for _ in range(rng.choice([0, 1, 4_000]))]
    return [None, 1.5, "é\n" * rng.randrange(9), [1, 2, 3]][kind]


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_the_whole(seed: int) -> None:
    content = random_content(random.Random(seed), 4)
    assert b"".join(encode_pieces(content)) == msgspec.json.encode(content), seed


def test_no_piece_is_large() -> None:
    rows = [[[-1.25, token, None] for token in range(20)] for _ in range(20_000)]
    pieces = list(encode_pieces([{"meta_info": {"output_top_logprobs": rows}}]))
    assert max(map(len, pieces)) < 200_000


@pytest.mark.process
def test_a_large_answer_is_whole(server: ServerUnderTest) -> None:
    ids = [number % 256 for number in range(4000)]
    answers = generate(server, 90, input_ids=[ids] * 8, return_logprob=True, logprob_start_len=0, top_logprobs_num=3)
    assert len(answers) == 8
    for answer in answers:
        meta = answer["meta_info"]
        assert [row[1] for row in meta["input_token_logprobs"]] == ids
        assert len(meta["input_top_logprobs"]) == 4000 and len(meta["output_top_logprobs"]) == 90
