"""Llama 3's calls: bare JSON objects."""

from __future__ import annotations

import pytest

from baton.entrypoints.tool_parsers.llama3 import Llama3Parser
from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Text, forced_prefix
from tests.doubles.answer_cuts import TOOLS, Expected, arguments_of, check, check_every_beginning, parse

CALL = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
OSLO = ("get_weather", '{"city": "Oslo"}')

CASES: dict[str, tuple[str, Expected]] = {
    "a call": (CALL, [OSLO]),
    "whitespace around": (f"\n\n {CALL}\n", [OSLO]),
    "words after": (f"{CALL}\nDone.", [OSLO, "\nDone."]),
    "several": (f"{CALL}; {CALL}\n{CALL},{CALL}", [OSLO, OSLO, OSLO, OSLO]),
    "a separator at the end": (f"{CALL};", [OSLO, ";"]),
    "nested": (
        '{"type": "function", "name": "write_file", "parameters": {"content": {"a": ["}", {"b": "\\"{"}]}}}',
        [("write_file", '{"content": {"a": ["}", {"b": "\\"{"}]}}')],
    ),
    "arguments first": ('{"arguments": {"x": 1}, "name": "list_files"}', [("list_files", '{"x": 1}')]),
    "keys of no call behind the arguments": (
        '{"name": "list_files", "parameters": {}, "strict": true} ok',
        [("list_files", "{}"), " ok"],
    ),
    "no arguments": ('{"name": "list_files"}', [("list_files", "{}")]),
    "behind the tag": (f"<|python_tag|>{CALL}", [OSLO]),
    "behind the tag and words": (f"Hm. <|python_tag|> {CALL};{CALL} ok", ["Hm. ", OSLO, OSLO, " ok"]),
    "an unknown tool behind the tag": (
        '<|python_tag|>{"name": "nope", "extra": 1, "parameters": {}}',
        [("nope", "{}")],
    ),
    "a tag behind each": (f"<|python_tag|>{CALL}; <|python_tag|>{CALL}", [OSLO, OSLO]),
    "a tag and no object": (
        'a<|python_tag|>search.call(query="x")',
        ['a<|python_tag|>search.call(query="x")'],
    ),
    "a tag twice": (f"<|python_tag|><|python_tag|>{CALL}", ["<|python_tag|>", OSLO]),
    "an object that is no call": ('{"name": "Bob", "age": 5}', ['{"name": "Bob", "age": 5}']),
    "an object with other keys": (' {"city": "Oslo"}', [' {"city": "Oslo"}']),
    "an object in the middle": (f"It is {CALL}", [f"It is {CALL}"]),
    "a call and an object": (f'{CALL}; {{"a": 1}}', [OSLO, '; {"a": 1}']),
    "an object and a tag": (f'{{"a": 1}}<|python_tag|>{CALL}', ['{"a": 1}', OSLO]),
    "a list": ("[1, 2]", ["[1, 2]"]),
    "cut off": ('{"name": "get_weather", "parameters": {"ci', [("get_weather", '{"ci')]),
    "cut off in brackets": (
        '{"name": "get_weather", "parameters": {"a": {"b": 1<|python_tag|>{"name": "b"}',
        [("get_weather", '{"a": {"b": 1'), ("b", "{}")],
    ),
    "cut off after the name": ('{"name": "get_weather", "par', [("get_weather", "")]),
    "cut off name": ('{"name": "get_wea', ['{"name": "get_wea']),
    "cut off tag": ("Hm<|python", ["Hm<|python"]),
    "whitespace": (" \n", [" \n"]),
}


@pytest.mark.parametrize("case", CASES)
def test_pieces_do_not_depend_on_chunking(case: str) -> None:
    check(lambda: Llama3Parser(TOOLS), *CASES[case])


@pytest.mark.parametrize("case", ["several", "nested", "a tag behind each"])
def test_every_answer_prefix_is_parsed(case: str) -> None:
    check_every_beginning(lambda: Llama3Parser(TOOLS), CASES[case][0])


def test_object_that_cannot_be_a_call_is_text_immediately() -> None:
    parser = Llama3Parser(TOOLS)
    assert parser.push_text('{"city') == []
    assert parser.push_text('"') == [Text('{"city"')]
    assert parser.push_text("<") == [] and parser.push_text("a{") == [Text("<a{")]


def test_arguments_are_streamed_as_they_arrive() -> None:
    parser = Llama3Parser(TOOLS)
    assert parser.push_text('{"name": "list_files", "parameters": {"') == [
        CallBegins(0, "list_files"),
        CallArguments(0, '{"'),
    ]
    assert parser.push_text("a") == [CallArguments(0, "a")]


@pytest.mark.parametrize("name", [None, "get_weather"])
def test_forced_prefix_yields_a_call(name: str | None) -> None:
    parser = Llama3Parser(TOOLS)
    rest = ' {"city": "Oslo"}}' if name else 'get_weather", "parameters": {"city": "Oslo"}}'
    assert arguments_of(parse(parser, [forced_prefix(parser, name), rest])) == [{"city": "Oslo"}]
