"""Answers that are made to cost time or memory: what a parser does per character and what it holds stay bounded."""

from __future__ import annotations

import sys

import pytest

from baton.entrypoints.tool_parsers.reader import StreamParser
from baton.entrypoints.tool_parsers.registry import TOOL_PARSERS
from tests.doubles.answer_cuts import TOOLS, parse

SIZE = 200_000
HELD = 32
"""Characters that a parser may hold between pushes: the longest beginning of a mark, roughly."""

HOSTILE: list[tuple[str, str, str]] = [
    # format, beginning, what follows again and again
    ("qwen", "", "\n<tool_call"),
    ("qwen", "", '<tool_call>{"'),
    ("qwen", "<tool_call>", '{"a":'),
    ("qwen", '<tool_call>{"name": "list_files", "arguments": ', '{"a":<'),
    ("qwen", '<tool_call>{"name": "list_files", "arguments": "', "\\"),
    ("qwen", '<tool_call>{"name": "list_files", "arguments": {}}', " "),
    ("qwen3_coder", "<function=list_files>", "\n</parameter"),
    ("qwen3_coder", "<function=list_files><parameter=a>", "\n</parameter"),
    ("qwen3_coder", "", "<function="),
    ("llama3", "", " "),
    ("llama3", "{", '"name":{'),
    ("llama3", "", '<|python_tag|>{"name":'),
    ("mistral", "", "[TOOL_CALLS]["),
    ("mistral", '[TOOL_CALLS][{"name": "a"}', ',{"name":"a"}'),
    ("deepseekv3", "", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
    ("deepseekv3", "<｜tool▁call▁begin｜>", "a"),
    ("pythonic", "", "\n["),
    ("pythonic", "[list_files(", "["),
    ("pythonic", "[list_files(a=", '"'),
    ("pythonic", "", "[list_files("),
    ("gpt-oss", "", "<|channel|>"),
    ("gpt-oss", "", "<|start|>a<|channel|>analysis<|message|>"),
]


@pytest.mark.parametrize(("name", "beginning", "again"), HOSTILE)
def test_held_back_text_is_bounded(name: str, beginning: str, again: str) -> None:
    is_first = (name, beginning, again) == next(each for each in HOSTILE if each[0] == name)
    size = SIZE if is_first else SIZE // 10
    text = (beginning + again * (size // len(again)))[:size]
    parser = TOOL_PARSERS[name](TOOLS)
    assert isinstance(parser, StreamParser)
    most = 0
    for character in text:
        parser.push_text(character)
        most = max(most, parser.reader.held)
    assert most <= HELD


def calls_made(name: str, text: str, size_of_parts: int) -> int:
    """Calls of functions, built-in ones included, that parsing takes."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    parts = [text[start : start + size_of_parts] for start in range(0, len(text), size_of_parts)]
    parser = TOOL_PARSERS[name](TOOLS)
    sys.setprofile(profile)
    try:
        parse(parser, parts)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("size_of_parts", [1, SIZE])
@pytest.mark.parametrize(("name", "beginning", "again"), HOSTILE)
def test_parser_work_is_linear_in_answer_length(name: str, beginning: str, again: str, size_of_parts: int) -> None:
    few, many = 50, 200
    small = calls_made(name, beginning + again * few, size_of_parts)
    large = calls_made(name, beginning + again * many, size_of_parts)
    assert large <= many / few * 1.1 * small
