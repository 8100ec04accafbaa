"""Answers put together at random from pieces of every format: nothing raises, and cuts change nothing."""

from __future__ import annotations

import random

import pytest

from baton.entrypoints.reasoning_parsers.output_parser import OutputParser
from baton.entrypoints.reasoning_parsers.registry import REASONING_PARSERS
from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins
from baton.entrypoints.tool_parsers.registry import TOOL_PARSERS
from tests.doubles.answer_cuts import SEED, TOOLS, Parser, parse

COMMON = [
    "{", "}", '"', "\\", "[", "]", ",", ":", " ", "\n", "a", "5", "null", '"name": "list_files"', '"arguments": {',
]  # fmt: skip
FRAGMENTS = {
    "qwen": ["<tool_call>", "\n<tool_call>\n", "</tool_call>", '<tool_call>{"name": "a", "arguments": {"x": "'],
    "qwen3_coder": [
        "<tool_call>", "</tool_call>", "<function=", "<function=get_weather>", "<parameter=", "<parameter=city>",
        "<parameter=days>", "</parameter>", "</function>", ">",
    ],
    "llama3": ["<|python_tag|>", '{"name": "list_files", "parameters": {', ";"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [{", "[ARGS]", "[CALL_ID]", '[TOOL_CALLS]a[ARGS]{"x": '],
    "deepseekv3": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>", "function", "```json", "```",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{",
    ],
    "pythonic": ["[list_files(", "get_weather(", "(", ")", "=", "city=", "'", "'''", '"""', "<|python_start|>", "\n["],
    "gpt-oss": [
        "<|start|>", "assistant", "<|channel|>", "analysis", "final", " to=functions.a", "<|message|>", "<|end|>",
        "<|call|>", "<|return|>", "<|channel|>commentary to=functions.a<|message|>{",
    ],
}  # fmt: skip
REASONING = {"gpt-oss": "gpt-oss", "deepseekv3": "deepseek-r1"}
TAGS = ["<think>", "</think>", "\n</think>\n\n", "<|channel|>analysis<|message|>"]


@pytest.mark.parametrize("with_thoughts", [False, True])
@pytest.mark.parametrize("name", FRAGMENTS)
def test_random_answers_parse_equally_for_any_chunking(name: str, with_thoughts: bool) -> None:
    def make() -> Parser:
        tools = TOOL_PARSERS[name](TOOLS)
        return OutputParser(REASONING_PARSERS[REASONING.get(name, "qwen3")](), tools) if with_thoughts else tools

    source = random.Random(SEED)
    fragments = COMMON + FRAGMENTS[name] * 3 + (TAGS if with_thoughts else [])
    for _ in range(400):
        text = "".join(source.choices(fragments, k=source.randint(1, 14)))
        whole = parse(make(), [text])
        assert parse(make(), text) == whole, text
        place = source.randint(0, len(text))
        assert parse(make(), [text[:place], text[place:]]) == whole, text
        begun = [piece.index for piece in whole if isinstance(piece, CallBegins)]
        assert begun == list(range(len(begun))), text
        last = -1
        for piece in whole:
            last = piece.index if isinstance(piece, CallBegins) else last
            assert not isinstance(piece, CallArguments) or piece.index == last, text
