"""Prompts that repeat a part of the request, and may be a thousand times as long as it."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from baton.entrypoints.pooling.prompts import JoinedTexts, PooledCall, PoolingTools, truncated
from baton.entrypoints.pooling.scores import parse_rerank, parse_score
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import RequestRefused
from tests.doubles.manager_rig import Backend, check
from tests.doubles.pooled_models import write_tokenizer

LANGUAGE_MODEL = {
    "kind": "last", "normalizes": True, "is_embedder": False, "refusal": "", "hidden_size": 8, "head": "language",
    "labels": [], "label_activation": "softmax",
}  # fmt: skip
CROSS_ENCODER = LANGUAGE_MODEL | {"head": "labels", "labels": ["relevance"], "label_activation": "sigmoid"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("model"), ends=True))


def make_tools(backend: Backend, model: dict[str, Any], rendered: list[int] | None = None) -> PoolingTools:
    """rendered: gets the length of each chat."""

    def render(messages: list[dict[str, Any]]) -> str:
        text = "\n".join(message["content"] for message in messages)
        if rendered is not None:
            rendered.append(len(text))
        return text

    backend.manager.worker_info["pooling"] = model
    return PoolingTools(backend.manager, str, render)


async def refusal_and_peak(call: PooledCall, tools: PoolingTools) -> tuple[RequestRefused, int]:
    """Why the call's prompts are refused, and the bytes that were allocated until then."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestRefused) as caught:
            await call.make_prompts(tools)
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("truncated", [False, True])
def test_query_before_many_items_takes_memory_of_a_few(tokenizer: Tokenizer, truncated: bool) -> None:
    """All texts together would have 100 MB."""

    async def body(backend: Backend) -> None:
        fields = {"query": "x" * 100_000, "items": ["y"] * 1000, "label_token_ids": [5]}
        call = parse_score(fields | ({"truncate_prompt_tokens": 5} if truncated else {}))
        refused, peak = await refusal_and_peak(call, make_tools(backend, LANGUAGE_MODEL))
        assert refused.param == "items"
        if truncated:
            assert "more than 2000000 tokens together" in refused.message
        else:
            assert refused.code == "context_length_exceeded"
        assert peak < 30_000_000

    check(tokenizer, body, context_length=50_000)


def test_query_of_ids_before_many_items_is_refused_before_it_is_repeated(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        call = parse_score({"query": [5] * 20_000, "items": [[1]] * 1000, "label_token_ids": [5]})
        refused, peak = await refusal_and_peak(call, make_tools(backend, LANGUAGE_MODEL))
        assert (refused.param, "tokens together" in refused.message) == ("items", True)
        assert peak < 1_000_000

    check(tokenizer, body, context_length=50_000)


@pytest.mark.parametrize("field", ["query", "instruction"])
def test_chats_of_a_long_query_are_rendered_as_they_are_read(tokenizer: Tokenizer, field: str) -> None:
    async def body(backend: Backend) -> None:
        rendered: list[int] = []
        call = parse_rerank({"query": "q", "documents": ["y"] * 1000} | {field: "x" * 100_000})
        refused, _ = await refusal_and_peak(call, make_tools(backend, LANGUAGE_MODEL, rendered))
        assert refused.code == "context_length_exceeded" and len(rendered) == 1

    check(tokenizer, body, context_length=50_000)


def test_query_of_a_cross_encoder_is_refused_before_it_is_repeated(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        call = parse_score({"text_1": "x" * 20_000, "text_2": ["y"] * 1000})
        refused, peak = await refusal_and_peak(call, make_tools(backend, CROSS_ENCODER))
        assert (refused.param, "tokens together" in refused.message) == ("text_2", True)
        assert peak < 10_000_000

    check(tokenizer, body, context_length=50_000)


def test_texts_of_several_groups_keep_their_order(tokenizer: Tokenizer) -> None:
    """Some are longer than a group, some groups have several."""

    async def body(backend: Backend) -> None:
        items = ["a" * length for length in (70_000, 3, 40_000, 30_000, 1, 66_000, 2)]
        prompts = await parse_score({"query": "q", "items": items, "label_token_ids": [5]}).make_prompts(
            make_tools(backend, LANGUAGE_MODEL)
        )
        assert [prompt.input_ids for prompt in prompts] == [[113, *[97] * len(item), 256] for item in items]
        texts = JoinedTexts("items", list(map(len, items)), str)
        assert [list(group) for group in texts.groups()] == [[0], [1, 2], [3, 4], [5], [6]]

    check(tokenizer, body, context_length=100_000)


@pytest.mark.parametrize(
    ("most", "right", "left"),
    [
        (7, [1, 5, 6, 7, 8, 2], [1, 5, 6, 7, 8, 2]),
        (4, [1, 5, 6, 2], [1, 7, 8, 2]),
        (2, [1, 2], [1, 2]),
        (1, [2], [1]),
    ],
)
def test_truncated_ids_keep_the_special_ones(most: int, right: list[int], left: list[int]) -> None:
    for keeps_end, expected in ((False, right), (True, left)):
        assert truncated([1, 5, 6, 7, 8, 2], most, ([1], [2]), keeps_end) == expected
    assert truncated([5, 6], 1, ([], []), True) == [6] and truncated([5, 6], 1, ([], []), False) == [5]
    assert truncated([5, 6, 3, 4], 1, ([], [3, 4]), False) == [5], "special ones that do not fit are cut off, too"


def test_pairs_lose_the_side_of_their_document(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        tools = make_tools(backend, CROSS_ENCODER)
        for side, kept in (("right", b"de"), ("left", b"fg")):
            call = parse_rerank(
                {"query": "q", "documents": ["defg"], "truncate_prompt_tokens": 5, "truncation_side": side}
            )
            (prompt,) = await call.make_prompts(tools)
            assert prompt.input_ids == [113, 256, *kept, 256]

    check(tokenizer, body)


def test_cross_encoder_takes_an_empty_query_or_document(tokenizer: Tokenizer) -> None:
    """The special tokens of the pair are there, as transformers puts them: one empty document fails no other."""

    async def body(backend: Backend) -> None:
        tools = make_tools(backend, CROSS_ENCODER)
        prompts = await parse_rerank({"query": "q", "documents": ["", "d"]}).make_prompts(tools)
        assert [prompt.input_ids for prompt in prompts] == [[113, 256, 256], [113, 256, 100, 256]]
        nothing = parse_rerank({"query": "", "documents": ["d", ""], "add_special_tokens": False})
        with pytest.raises(RequestRefused, match=r"documents\[1\] is empty"):
            await nothing.make_prompts(tools)

    check(tokenizer, body)
