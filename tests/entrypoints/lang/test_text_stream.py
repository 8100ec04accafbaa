"""Followers in threads and on loops see all the text, in order, and then its end."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from baton.entrypoints.lang.text_stream import TextStream


def test_text_stream_followers_see_all_text() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    stream, texts = TextStream("begin "), []

    def follow() -> None:
        texts.append("".join(stream.follow()))

    async def follow_async() -> None:
        async def one() -> None:
            texts.append("".join([piece async for piece in stream.follow_async()]))

        await asyncio.gather(one(), one())

    threads = [threading.Thread(target=follow) for _ in range(3)]
    threads.append(threading.Thread(target=lambda: asyncio.run(follow_async())))
    for thread in threads:
        thread.start()
    for _ in range(200):
        stream.append_piece(rng.choice(("", "a", "longer ", "\n")))
        if rng.random() < 0.1:
            time.sleep(0.001)
    stream.close()
    for thread in threads:
        thread.join(60)
    assert texts == [stream.text] * 5, f"seed {seed}"
    assert list(stream.follow()) == [stream.text], "a late follower gets it in one piece"


def test_stream_error_follows_the_text() -> None:
    stream = TextStream()
    stream.append_piece("a")
    stream.close(ValueError("oops"))
    stream.close()
    assert stream.is_closed
    got = []
    with pytest.raises(ValueError, match="oops"):
        for piece in stream.follow():
            got.append(piece)

    async def run() -> None:
        async for piece in stream.follow_async():
            got.append(piece)

    with pytest.raises(ValueError, match="oops"):
        asyncio.run(run())
    assert got == ["a", "a"]


def test_follower_of_a_closed_loop_does_not_stop_the_writer() -> None:
    stream = TextStream()

    async def leave() -> None:
        async for _ in stream.follow_async():
            return

    stream.append_piece("a")
    asyncio.run(leave())
    stream.append_piece("b")
    stream.close()
    assert stream.text == "ab"
