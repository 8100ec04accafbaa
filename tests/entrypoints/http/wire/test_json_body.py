"""Large bodies are decoded as small ones are, within bounds, and with turns for others."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from baton.entrypoints.http.wire import json_body
from baton.entrypoints.http.wire.json_body import decode_object
from baton.scheduler.outcome import RequestRefused


def decode(body: bytes) -> dict[str, Any]:
    data = bytearray(body)
    decoded = asyncio.run(decode_object(data))
    assert not data, "it holds memory"
    return decoded


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "PIECE_BYTES", 64)


def random_text(rng: random.Random) -> str:
    return "".join(
        rng.choices(["a", '"', "\\", "\n", "é", "中", "😀", "\\u", "d83d", ",", "[", "\0"], k=rng.randrange(200))
    )


def random_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(6 if depth else 3)
    size = rng.randrange(40)
    return [
        lambda: random_text(rng),
        lambda: [rng.randrange(-9, 10**9) for _ in range(size)],
        lambda: rng.choice([None, True, 1.5, -3]),
        lambda: [random_text(rng) if rng.random() < 0.9 else None for _ in range(size)][1:] or [""],
        lambda: [[rng.randrange(300)] * rng.randrange(50) for _ in range(size)],
        lambda: {random_text(rng): random_value(rng, depth - 1) for _ in range(size // 8)},
    ][kind]()


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.usefixtures("small_pieces")
def test_pieces_are_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    content = {f"field {number}": random_value(rng, 3) for number in range(5)}
    spaced = rng.choice([None, 2])
    try:
        assert decode(json.dumps(content, ensure_ascii=rng.random() < 0.5, indent=spaced).encode()) == content, seed
    except RequestRefused as refused:
        # A long list that begins with null, or has it after numbers and lists: no field takes one.
        assert "several kinds" in refused.message and "null" in json.dumps(content), seed


@pytest.mark.parametrize("letter", ["\\u4e2d", "\\ud83d\\ude00", '\\"', "\\\\", "\\\\u12", "é"])
@pytest.mark.usefixtures("small_pieces")
def test_a_text_is_cut_between_characters(letter: str) -> None:
    body = f'{{"a": "{letter * 300}"}}'.encode()
    assert decode(body) == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [b"{" * 500, b'{"a": "' + b"x" * 500, b'{"a": [' + b"1," * 300, b'{"a": [' + b"1," * 300 + b"]}", b"\xff" * 500,
     b'{"a": "' + b"\xff" * 500 + b'"}', b'{"a": "' + b"\\ud83d" * 200 + b'"}', b'["' + b"x" * 500 + b'"]',
     b'{"a": "' + b"\\x" * 500 + b'"}', b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}"],
)  # fmt: skip
@pytest.mark.usefixtures("small_pieces")
def test_garbage_is_invalid(body: bytes) -> None:
    with pytest.raises(RequestRefused) as caught:
        decode(body)
    assert caught.value.code in ("invalid_json", "invalid_request") and caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [b'{"text": [' + b"{}," * 3_000_000 + b"{}]}", b'{"text": [' + b"[[]]," * 3_000_000 + b"[]]}",
     b'{"input_ids": [' + b"1," * 3_000_000 + b"1]}", b'{"text": [' + b'"",' * 3_000_000 + b'""]}',
     b'{"input_ids": [' + (b"[" + b"1," * 100_000 + b"1],") * 30 + b"[1]]}",
     b'{"text": ["a",' + b"{}," * 3_000_000 + b"{}]}",
     b"{" + b'"a":1,' * 3_000_000 + b'"b":1}'],
)  # fmt: skip
def test_the_values_of_a_body_are_bounded(body: bytes) -> None:
    with pytest.raises(RequestRefused, match=r"2000000 values|several kinds"):
        decode(body)


def test_others_get_their_turn() -> None:
    async def body() -> int:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(others())
        await decode_object(bytearray(json.dumps({"text": "word " * 2_000_000}).encode()))
        counting.cancel()
        return turns

    assert asyncio.run(body()) > 20
