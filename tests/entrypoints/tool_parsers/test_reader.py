"""A text that arrives in pieces. What parsers cannot be made to show is tested here."""

from __future__ import annotations

import pytest

from baton.entrypoints.tool_parsers.reader import Reader, StreamParser
from baton.entrypoints.tool_parsers.registry import TOOL_PARSERS
from tests.doubles.answer_cuts import TOOLS


def test_consumed_text_begins_no_mark() -> None:
    reader = Reader()
    reader.feed("<to")
    assert reader.take_text(1) == "<"
    assert reader.split(("<tool",)) == ("to", "")


def test_first_mark_in_the_text_wins() -> None:
    reader = Reader()
    reader.feed("a\n<b>c<b")
    assert reader.split(("<b>", "\n<b>")) == ("a", "\n<b>")
    assert reader.split(("<b>", "\n<b>")) == ("c", "")
    assert reader.unread == 2
    reader.end()
    assert reader.split(("<b>", "\n<b>")) == ("<b", "")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen", '<tool_call>{"name": "list_files", "arguments": {"a": 1}}</tool_call>'),
        ("qwen3_coder", "<tool_call><function=list_files><parameter=a>1</parameter></function></tool_call>"),
        ("llama3", '{"name": "list_files", "parameters": {"a": 1}};'),
        ("mistral", '[TOOL_CALLS] [{"name": "list_files", "arguments": {"a": 1}}]'),
        ("deepseekv31", '<｜tool▁call▁begin｜>list_files<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'),
        ("pythonic", "[list_files(a=1)]"),
        ("gpt-oss", '<|channel|>commentary to=functions.list_files<|message|>{"a": 1}<|call|>'),
    ],
)
def test_emitted_text_is_not_kept(name: str, call: str) -> None:
    """Twice the memory is all it would cost, but for every answer."""
    parser = TOOL_PARSERS[name](TOOLS)
    assert isinstance(parser, StreamParser)
    place = call.index("1")
    parser.push_text(call[:place])
    assert parser.reader.kept() == ""
    parser.push_text(f"{call[place:]} ok")
    parser.push_text(" ok")
    assert parser.reader.kept() == ""
