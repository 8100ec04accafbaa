"""Large answers are the same JSON, piece by piece."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from baton.entrypoints.http.wire.answers import encode_pieces, json_answer
from tests.doubles.http_calls import generate
from tests.doubles.server_under_test import ServerUnderTest


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
def test_piecewise_json_equals_whole_json(seed: int) -> None:
    content = random_content(random.Random(seed), 4)
    whole = msgspec.json.encode(content)
    assert b"".join(encode_pieces(content)) == whole, seed
    assert b"".join(encode_pieces(with_iterators(content))) == whole, seed


def with_iterators(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: with_iterators(value) for name, value in content.items()}
    return iter(content) if isinstance(content, list) else content


def test_encoded_pieces_are_bounded() -> None:
    rows = [None, *([[-1.25, token, None] for token in range(20)] for _ in range(20_000))]
    pieces = list(encode_pieces([{"meta_info": {"output_top_logprobs": rows}}]))
    assert max(map(len, pieces)) < 200_000


def test_small_answer_may_contain_iterators() -> None:
    answer = asyncio.run(json_answer(lambda: {"rows": map(str, range(3))}, 3))
    assert answer.body == b'{"rows":["0","1","2"]}' and answer.headers["content-length"] == "22"


@pytest.mark.parametrize("stays", [True, False])
def test_answer_pieces_are_encoded_as_the_client_reads(stays: bool) -> None:
    made, sent = [], []
    rows = ([-1.25, made.append(number), number] for number in range(300_000))

    async def run() -> None:
        left = asyncio.Event()

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append((len(made), message))
            if not stays and len(sent) == 3:
                left.set()
                await asyncio.Event().wait()

        answer = await json_answer(lambda: {"rows": rows}, 1_000_000)
        assert "content-length" not in answer.headers
        await answer({"type": "http"}, receive, send)

    asyncio.run(asyncio.wait_for(run(), 20))
    steps = [after - before for (before, _), (after, _) in pairwise(sent)]
    assert max(steps) < 20_000, "no more is made than is sent next"
    if stays:
        body = b"".join(message.get("body", b"") for _, message in sent)
        assert [row[2] for row in msgspec.json.decode(body)["rows"]] == list(range(300_000))
        assert not sent[-1][1]["more_body"]
    else:
        assert len(made) < 60_000, "nobody reads the rest"


@pytest.mark.process
def test_large_answer_arrives_complete(server: ServerUnderTest) -> None:
    ids = [number % 256 for number in range(4000)]
    answers = generate(server, 90, input_ids=[ids] * 8, return_logprob=True, logprob_start_len=0, top_logprobs_num=3)
    assert len(answers) == 8
    for answer in answers:
        meta = answer["meta_info"]
        assert [row[1] for row in meta["input_token_logprobs"]] == ids
        assert len(meta["input_top_logprobs"]) == 4000 and len(meta["output_top_logprobs"]) == 90
