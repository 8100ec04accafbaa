"""Large bodies are decoded as small ones are, within bounds, and with turns for others."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton.entrypoints.http.wire import json_body
from baton.entrypoints.http.wire.json_body import PIECE_BYTES, decode_object
from baton.entrypoints.http_statuses import status_of
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
def test_piecewise_json_equals_whole_json(seed: int) -> None:
    rng = random.Random(seed)
    content = {f"field {number}": random_value(rng, 3) for number in range(5)}
    spaced = rng.choice([None, 2])
    assert decode(json.dumps(content, ensure_ascii=rng.random() < 0.5, indent=spaced).encode()) == content, seed


@pytest.mark.parametrize("letter", ["\\u4e2d", "\\ud83d\\ude00", '\\"', "\\\\", "\\\\u12", "é"])
@pytest.mark.usefixtures("small_pieces")
def test_text_pieces_are_cut_between_characters(letter: str) -> None:
    body = f'{{"a": "{letter * 300}"}}'.encode()
    assert decode(body) == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [b"{" * 500, b'{"a": "' + b"x" * 500, b'{"a": [' + b"1," * 300, b'{"a": [' + b"1," * 300 + b"]}", b"\xff" * 500,
     b'{"a": "' + b"\xff" * 500 + b'"}', b'{"a": "' + b"\\ud83d" * 200 + b'"}', b'["' + b"x" * 500 + b'"]',
     b'{"a": "' + b"\\x" * 500 + b'"}', b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}"],
)  # fmt: skip
@pytest.mark.usefixtures("small_pieces")
def test_malformed_large_bodies_are_invalid(body: bytes) -> None:
    with pytest.raises(RequestRefused) as caught:
        decode(body)
    assert caught.value.code in ("invalid_json", "invalid_request") and status_of(caught.value) == 400


@pytest.mark.parametrize("rest", ["", "x" * 300])
@pytest.mark.parametrize(
    ("text", "half"),
    [("\\ud800", "ud800"), ("\\ud800 and more", "ud800"), ("x\\uDFFF", "uDFFF"), ("\\ud83d\\ude00\\udc01", "udc01"),
     ("\\ud83d\\u0041", "ud83d"), ("\\\\\\ud900", "ud900"), ("\\ud801\\ud83d\\ude00", "ud801")],
)  # fmt: skip
@pytest.mark.usefixtures("small_pieces")
def test_half_a_character_is_named(text: str, half: str, rest: str) -> None:
    for body in (
        f'{{"a": "{rest}{text}"}}',
        f'{{"{text}": ["{rest}"]}}',
        f'{{"a": {{"b": ["{text}"]}}, "c": "{rest}"}}',
    ):
        with pytest.raises(RequestRefused, match=rf"not valid JSON: \\{half} is half of a surrogate pair"):
            decode(body.encode())


@pytest.mark.parametrize("text", ["\\\\ud800", "\\ud83d\\ude00"])
def test_other_mistakes_are_not_blamed_on_whole_characters(text: str) -> None:
    with pytest.raises(RequestRefused, match=r"malformed|truncated"):
        decode(f'{{"a": "{text}", }}'.encode())


@pytest.mark.parametrize(
    "body",
    [b'{"text": [' + b"{}," * 300_000 + b"{}]}", b'{"text": [' + b"[[]]," * 300_000 + b"[]]}",
     b'{"input_ids": [' + b"1," * 300_000 + b"1]}", b'{"text": [' + b'"",' * 300_000 + b'""]}',
     b'{"input_ids": [' + (b"[" + b"1," * 10_000 + b"1],") * 30 + b"[1]]}",
     b'{"text": ["a",' + b"{}," * 30_000 + b"{}]}", b'{"text": ["a",' + b"[[]]," * 15_000 + b"[]]}",
     b"{" + b",".join(b'"%d":1' % number for number in range(150_000)) + b"}",
     b'{"text": [' + (b"[" * 100 + b"]" * 100 + b",") * 300 + b"1]}",
     b'{"text": [' + (b'{"a":' * 100 + b"1" + b"}" * 100 + b",") * 300 + b"1]}"],
)  # fmt: skip
def test_body_value_count_is_bounded(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "MAX_VALUES", 200_000)
    with pytest.raises(RequestRefused, match=" 200000 values"):
        decode(body)


@pytest.mark.parametrize(
    "content",
    [{"text": "word " * 400_000}, {"text": "中" * 400_000}, {"text": ["a prompt of thirty characters"] * 60_000},
     {"text": ["word " * 80_000] * 6}, {"input_ids": [[7] * 2_000] * 140}, {"input_ids": [7] * 400_000},
     {"sampling_params": [{"temperature": 0, "stop": ["a"]}] * 14_000}, {f"field {i}": i for i in range(60_000)}],
    ids=["a text", "escapes", "texts", "long texts", "lists of ids", "ids", "objects", "names"],
)  # fmt: skip
def test_decoding_yields_to_other_tasks(content: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two turns the decoder gets about a piece."""
    since_turn = most = 0
    decode_json = msgspec.json.decode

    def counted(data: bytes, **options: Any) -> Any:
        nonlocal since_turn, most
        since_turn += len(data)
        most = max(most, since_turn)
        return decode_json(data, **options)

    async def body() -> None:
        async def others() -> None:
            nonlocal since_turn
            while True:
                await asyncio.sleep(0)
                since_turn = 0

        counting = asyncio.create_task(others())
        assert await decode_object(bytearray(json.dumps(content).encode())) == content
        counting.cancel()

    monkeypatch.setattr(msgspec.json, "decode", counted)
    asyncio.run(body())
    assert PIECE_BYTES / 10 < most < 3 * PIECE_BYTES


@pytest.mark.parametrize(
    "body",
    [lambda: b'{"text": "' + b"w" * 26_000_000 + "😀".encode() + b'"}',
     lambda: b'{"text": ["' + b"w" * 101_000_000 + b'"]}',
     lambda: b'{"text": [' + (b'"' + b"w" * 1_000 + "😀".encode() + b'",') * 26_000 + b"1]}",
     lambda: b"{" + b",".join(b'"%d %s":1' % (i, b"w" * 1_000 + "😀".encode()) for i in range(26_000)) + b"}"],
    ids=["an emoji", "ascii", "texts", "names"],
)  # fmt: skip
def test_text_memory_of_a_body_is_bounded(body: Callable[[], bytes]) -> None:
    """A text with one emoji takes four bytes a character. (Made here: collecting the tests must not take as much.)"""
    with pytest.raises(RequestRefused, match=" 2000000 values"):
        decode(body())


def test_deeply_nested_lists_yield_to_other_tasks() -> None:
    body = bytearray(b'{"text": [' + (b"[" * 150 + b"]" * 150 + b",") * 300 + b"1]}")

    async def turns() -> int:
        found = 0
        decoding = asyncio.create_task(decode_object(body))
        while not decoding.done():
            await asyncio.sleep(0)
            found += 1
        await decoding
        return found

    assert asyncio.run(turns()) > 300  # one for each element, which takes 300 steps


def test_long_whitespace_is_decoded() -> None:
    body = b'{"a":' + b" " * 2**20 + b"1" + b" " * 2**20 + b"}" + b"\n" * 2**20
    assert decode(body) == {"a": 1}
