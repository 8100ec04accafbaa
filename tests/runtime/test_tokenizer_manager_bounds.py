"""What long texts, many prompts and large answers may cost the loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.runtime.answer import TokenLogprob
from baton.runtime.clients import SOLE_CLIENT
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import FinishReason, RequestRefused
from tests.doubles.manager_rig import Backend, check, child, prompt
from tests.doubles.packed_logprobs import chunk
from tests.doubles.prompts import make_prompt

LENGTH = FinishReason("length")


def test_long_texts_do_not_block_the_loop(tokenizer: Tokenizer) -> None:
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
        with pytest.raises(RequestRefused, match="Use max_new_tokens <= 49"):
            await backend.manager.open_answer(SOLE_CLIENT, [child("c", suffix_text=text)], stream=False)
        assert ticks > 5
        ticking.cancel()

    check(tokenizer, body, context_length=1_000_050)


def test_logprobs_are_unpacked_lazily(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of them are no work on the loop, and take no more memory than they did on their way."""
    made: list[int] = []

    def counted(logprob: float | None, token_id: int, *more: Any) -> TokenLogprob:
        made.append(token_id)
        return TokenLogprob(logprob, token_id, *more)

    monkeypatch.setattr("baton.runtime.answer.TokenLogprob", counted)

    async def body(backend: Backend) -> None:
        asked = prompt("a", return_logprob=True, logprob_start_len=0, top_logprobs_num=2, return_text_in_logprobs=True)
        with await backend.manager.open_answer(SOLE_CLIENT, [asked], stream=False) as call:
            came = chunk((97, -1.0), (98, -2.0), top=[(99, -0.5), (97, -1.0), (100, -0.5), (98, -2.0)])
            await backend.output("a", "", LENGTH, input_logprobs=came)
            (output,) = await call.outputs()
        assert not made and len(output.input_logprobs) == 2 and output.input_logprobs.num_entries == 6
        rows = iter(output.input_logprobs)
        first = next(rows)
        assert (first.text, [entry.text for entry in first.top or ()]) == ("a", ["c", "a"])
        assert 100 not in made, "the top entries of a token are unpacked with it"
        assert next(rows).id == 98

    check(tokenizer, body)


def test_ids_of_many_prompts_are_checked_in_slices(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(others())
        await asyncio.sleep(0)
        asked = [make_prompt(rid=f"p{number}", input_ids=[97] * 1_000) for number in range(500)]
        with await backend.manager.open_answer(SOLE_CLIENT, asked, stream=False):
            assert 8 <= turns <= 20
        counting.cancel()

    check(tokenizer, body, context_length=2_000)


def test_text_that_can_never_fit_is_not_tokenised(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    encode_piece = Tokenizer.encode_piece
    monkeypatch.setattr(Tokenizer, "encode_piece", lambda self, text: pieces.append(text) or encode_piece(self, text))
    monkeypatch.setattr(Tokenizer, "encode_batch", None)

    async def body(backend: Backend) -> None:
        for opened in ([prompt("p", "x" * 3_000_000)], [child("g", "c", suffix_text="x" * 3_000_000)]):
            with pytest.raises(RequestRefused, match="at least 100001 tokens") as caught:
                await backend.manager.open_answer(SOLE_CLIENT, opened, stream=False)
            assert caught.value.code == "context_length_exceeded"
        assert not pieces
        # This one could fit by its length, and is given up as soon as it shows that it does not.
        with pytest.raises(RequestRefused, match="at least 100001 tokens"):
            await backend.manager.open_answer(SOLE_CLIENT, [prompt("p", "xy " * 600_000)], stream=False)
        assert 2 <= len(pieces) <= 8

    check(tokenizer, body, context_length=100_000)


def test_tokens_per_call_are_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.runtime.text.prompt_tokenizer.MAX_TOKENS_OF_CALL", 20_000)

    async def body(backend: Backend) -> None:
        assert [len(ids) for ids in await backend.manager.tokenize(["x" * 5_000] * 4)] == [5_000] * 4
        with pytest.raises(RequestRefused, match="more than 20000 tokens together"):
            await backend.manager.tokenize(["x" * 5_000] * 5)

    check(tokenizer, body, context_length=100_000)
