"""What long texts, many prompts and large answers may cost the loop."""

from __future__ import annotations

import asyncio

import pytest
from manager_rig import Backend, check, child, prompt

from baton.runtime.answer import Answer
from baton.runtime.messages import (
    LogprobChunk,
    TextOutput,
    TextOutputs,
    TokenOutput,
)
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import FinishReason, RequestRefused
from baton.scheduler.token_buffer import pack_ids

LENGTH = FinishReason("length")


def test_long_texts_do_not_stop_the_loop(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        ticking = asyncio.create_task(tick())
        text = "word " * 200_000
        ids = await backend.manager.tokenize([text])
        assert len(ids[0]) == 1_000_000
        assert ticks > 5
        ticks = 0
        with pytest.raises(RequestRefused, match="max_new_tokens is 128"):
            await backend.manager.open([child("c", suffix_text=text)], stream=False)
        assert ticks > 5
        ticking.cancel()

    check(tokenizer, body, context_length=1_000_050)


def test_the_logprobs_of_each_prompt_are_a_turn_of_their_own(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    feed = Answer.feed
    monkeypatch.setattr(Answer, "feed", lambda *given: seen.append("fed") or feed(*given))

    async def body(backend: Backend) -> None:
        async def others() -> None:
            while True:
                seen.append("turn")
                await asyncio.sleep(0)

        with await backend.manager.open([prompt("a"), prompt("b")], stream=False) as call:
            counting = asyncio.create_task(others())
            chunk = LogprobChunk(ids=pack_ids([97]), values=bytes(4))
            items = [
                TextOutput(output=TokenOutput(rid=rid, new_ids=b"", finish=LENGTH, input_logprobs=chunk), text="")
                for rid in "ab"
            ]
            await backend.send(TextOutputs(items=items))
            await call.outputs()
            counting.cancel()
        first = seen.index("fed")
        assert seen.index("turn", first) < seen.index("fed", first + 1)

    check(tokenizer, body)


def test_a_text_that_can_never_fit_is_not_tokenised(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    encode_piece = Tokenizer.encode_piece
    monkeypatch.setattr(Tokenizer, "encode_piece", lambda self, text: pieces.append(text) or encode_piece(self, text))
    monkeypatch.setattr(Tokenizer, "encode_batch", None)

    async def body(backend: Backend) -> None:
        for opened in ([prompt("p", "x" * 3_000_000)], [child("g", "c", suffix_text="x" * 3_000_000)]):
            with pytest.raises(RequestRefused, match="has 3000000 characters") as caught:
                await backend.manager.open(opened, stream=False)
            assert caught.value.code == "context_length_exceeded"
        assert not pieces
        # This one could fit by its length, and is given up as soon as it shows that it does not.
        with pytest.raises(RequestRefused, match="more than 100000 tokens"):
            await backend.manager.open([prompt("p", "xy " * 600_000)], stream=False)
        assert 2 <= len(pieces) <= 8

    check(tokenizer, body, context_length=100_000)


def test_the_tokens_of_a_call_are_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.runtime.text.prompt_tokenizer.MAX_TOKENS_OF_CALL", 20_000)

    async def body(backend: Backend) -> None:
        assert [len(ids) for ids in await backend.manager.tokenize(["x" * 5_000] * 4)] == [5_000] * 4
        with pytest.raises(RequestRefused, match="more than 20000 tokens together"):
            await backend.manager.tokenize(["x" * 5_000] * 5)

    check(tokenizer, body, context_length=100_000)
