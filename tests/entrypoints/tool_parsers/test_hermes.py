"""Qwen's and Hermes' calls: JSON between tags."""

from __future__ import annotations

import pytest

from baton.entrypoints.tool_parsers.hermes import HermesParser, QwenParser
from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Text, forced_prefix
from tests.doubles.answer_cuts import TOOLS, Expected, arguments_of, check, check_every_beginning, parse

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OSLO = ("get_weather", '{"city": "Oslo"}')
NESTED = r'{"city": "Ål\"}]\\", "wanted": ["a", {"b": [{}, "{"]}], "c": "</tool_call>\n<tool_call>"}'

CASES: dict[str, tuple[str, Expected]] = {
    "a call": (CALL, [OSLO]),
    "words before": (f"Let me look.\n{CALL}", ["Let me look.", OSLO]),
    "only one line break is the tag's": (f"Let me look.\n\n{CALL}", ["Let me look.\n", OSLO]),
    "words after": (f"{CALL}\nDone.", [OSLO, "\nDone."]),
    "words between": (f"{CALL}\nand\n{CALL}", [OSLO, "\nand", OSLO]),
    "several": (f"{CALL}\n{CALL}{CALL}", [OSLO, OSLO, OSLO]),
    "trailing whitespace": (f"{CALL}\n \n", [OSLO]),
    "no line breaks": ('<tool_call>{"name":"list_files","arguments":{}}</tool_call>', [("list_files", "{}")]),
    "more line breaks": (
        '<tool_call>\n\n {\n"name" : "list_files" ,\n "arguments"\n:\n{ }\n}\n\n</tool_call>',
        [("list_files", "{ }")],
    ),
    "nested": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {NESTED}}}\n</tool_call>ok',
        [("get_weather", NESTED), "ok"],
    ),
    "several in a block": (
        '<tool_call>\n{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {"x": 1}}\n</tool_call>',
        [("a", "{}"), ("b", '{"x": 1}')],
    ),
    "arguments first": (
        '<tool_call>\n{"arguments": {"x": [1]}, "name": "a"}\n</tool_call>',
        [("a", '{"x": [1]}')],
    ),
    "other keys": (
        '<tool_call>\n{"id": "call_1", "n": -1.5e3, "l": [1, "}"], "o": {"p": "]"}, "t": true, "name": "a",'
        ' "arguments": {"x": 1}, "z": null}\n</tool_call>',
        [("a", '{"x": 1}')],
    ),
    "parameters": ('<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', [("a", '{"x": 1}')]),
    "no arguments": ('<tool_call>\n{"name": "a"}\n</tool_call>ok', [("a", "{}"), "ok"]),
    "null arguments": ('<tool_call>\n{"name": "a", "arguments": null}\n</tool_call>ok', [("a", "{}"), "ok"]),
    "arguments as a string": (
        r'<tool_call>{"name": "a", "arguments": "{\"x\": \"\u00e9\\\"\"}"}</tool_call>ok',
        [("a", '{"x": "é\\""}'), "ok"],
    ),
    "a line break in a string": (
        '<tool_call>{"name": "a", "arguments": "{\\"x\\":\n1}"}</tool_call>',
        [("a", '{"x":\n1}')],
    ),
    "no arguments as a string": ('<tool_call>{"name": "a", "arguments": ""}</tool_call>ok', [("a", "{}"), "ok"]),
    "half a character in a string": (
        r'<tool_call>{"name": "a", "arguments": "{\"x\": \"\ud83d\"}"}</tool_call>',
        [("a", r'{"x": "\ud83d"}')],
    ),
    "a second name and second arguments": (
        '<tool_call>{"name": "a", "arguments": {"x": 1}, "name": "b", "arguments": {"y": 2}}</tool_call>ok',
        [("a", '{"x": 1}'), "ok"],
    ),
    "a name and arguments twice": (
        '<tool_call>{"arguments": {"x": 1}, "arguments": {"y": 2}, "name": "a"}</tool_call>'
        '<tool_call>{"name": "a", "name": "b", "arguments": {"x": 1}}</tool_call>',
        [("a", '{"x": 1}'), ("a", '{"x": 1}')],
    ),
    "one bracket short": (
        '<tool_call>\n{"name": "a", "arguments": {"x": 1}\n</tool_call>ok',
        [("a", '{"x": 1}'), "ok"],
    ),
    "two brackets short": (
        '<tool_call>\n{"name": "a", "arguments": {"x": {"y": 1</tool_call>ok',
        [("a", '{"x": {"y": 1'), "ok"],
    ),
    "brackets short, and the next call": (
        '<tool_call>{"name": "a", "arguments": {"x": 1\n<tool_call>{"name": "b", "arguments": {}}',
        [("a", '{"x": 1\n'), ("b", "{}")],
    ),
    "a < that is no tag": ('<tool_call>{"name": "a", "arguments": {"x": <b>}}</tool_call>', [("a", '{"x": <b>}')]),
    "one bracket too many": (
        '<tool_call>\n{"name": "a", "arguments": {"x": 1}}}\n</tool_call>ok',
        [("a", '{"x": 1}'), "}\nok"],
    ),
    "no closing tag": (
        '<tool_call>\n{"name": "a", "arguments": {}}\n<tool_call>\n{"name": "b", "arguments": {}}',
        [("a", "{}"), ("b", "{}")],
    ),
    "cut off tag": ('<tool_call>{"name": "a", "arguments": {}}\n</tool', [("a", "{}"), "\n</tool"]),
    "cut off arguments": ('<tool_call>\n{"name": "a", "arguments": {"x": "y', [("a", '{"x": "y')]),
    "cut off before the arguments": ('<tool_call>\n{"name": "a", "argum', [("a", "")]),
    "cut off string of arguments": (
        r'<tool_call>{"name": "a", "arguments": "{\"x\": \"\u00e',
        [("a", '{"x": "')],
    ),
    "cut off character in a string of arguments": (
        r'<tool_call>{"name": "a", "arguments": "{\"x\": \"y\ud83d\ude0',
        [("a", '{"x": "y')],
    ),
    "cut off name": ('Hm.\n<tool_call>\n{"name": "get_we', ['Hm.\n<tool_call>\n{"name": "get_we']),
    "cut off call without a name": ('<tool_call>\n{"arguments": {"x": 1}}', ['<tool_call>\n{"arguments": {"x": 1}}']),
    "no JSON": ("a\n<tool_call>\nls -l\n</tool_call>b", ["a\n<tool_call>\nls -l\n</tool_call>b"]),
    "a number as arguments": (
        '<tool_call>{"name": "a", "arguments": 5}</tool_call>',
        ['<tool_call>{"name": "a", "arguments": 5}</tool_call>'],
    ),
    "a list as a string of arguments": (
        '<tool_call>{"name": "a", "arguments": "[1]"}</tool_call>',
        ['<tool_call>{"name": "a", "arguments": "[1]"}</tool_call>'],
    ),
    "an empty name": (
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        ['<tool_call>{"name": "", "arguments": {}}</tool_call>'],
    ),
    "a name with half a character": (
        r'<tool_call>{"name": "\ud800", "arguments": {}}',
        [r'<tool_call>{"name": "\ud800", "arguments": {}}'],
    ),
    "a number as a name": ('<tool_call>{"name": 5}', ['<tool_call>{"name": 5}']),
    "a key without a value": ('<tool_call>{"name" "a"}</tool_call>', ['<tool_call>{"name" "a"}</tool_call>']),
    "a name and then nothing of a call": ('<tool_call>{"name": "a" nor', ['<tool_call>{"name": "a" nor']),
    "garbage, then a call": (f'<tool_call>{{"a": {CALL}', ['<tool_call>{"a": ', OSLO]),
    "a tag twice": (f"<tool_call>{CALL}", ["<tool_call>", OSLO]),
    "a second call that is none": (
        '<tool_call>{"name": "a", "arguments": {}}\n{"b": 1}</tool_call>',
        [("a", "{}"), '{"b": 1}</tool_call>'],
    ),
    "no tags": ("1 < 2 <tool <tool_calls> </tool_call> {}\n", ["1 < 2 <tool <tool_calls> </tool_call> {}\n"]),
    "nothing": ("", []),
}


@pytest.mark.parametrize("case", CASES)
def test_pieces_do_not_depend_on_chunking(case: str) -> None:
    check(lambda: QwenParser(TOOLS), *CASES[case])


@pytest.mark.parametrize("case", ["nested", "other keys", "several in a block", "arguments as a string"])
def test_every_answer_prefix_is_parsed(case: str) -> None:
    check_every_beginning(lambda: QwenParser(TOOLS), CASES[case][0])


def test_parsed_arguments_are_json() -> None:
    assert arguments_of(parse(QwenParser(TOOLS), [CASES["nested"][0]])) == [
        {"city": 'Ål"}]\\', "wanted": ["a", {"b": [{}, "{"]}], "c": "</tool_call>\n<tool_call>"}
    ]


def test_unambiguous_text_is_not_held_back() -> None:
    parser = QwenParser(TOOLS)
    assert parser.push_text("a <") == [Text("a ")]
    assert parser.push_text("t") == []
    assert parser.push_text("o a\n") == [Text("<to a")]
    assert parser.push_text("b") == [Text("\nb")]
    assert parser.push_text('<tool_call>\n{"name": "list_files", "arguments": ') == []
    assert parser.push_text("{") == [CallBegins(0, "list_files"), CallArguments(0, "{")]
    for character in '"a\\"':
        assert parser.push_text(character) == [CallArguments(0, character)]
    assert parser.push_text('": [<') == [CallArguments(0, '": [')]
    assert parser.push_text("b") == [CallArguments(0, "<b")]
    assert parser.push_text("]}") == [CallArguments(0, "]}")]
    assert parser.push_text("}\n</tool_call>\n") == []
    assert parser.push_text("c") == [Text("\nc")]
    assert parser.finish() == []


def test_invalid_call_is_text_from_the_first_wrong_character() -> None:
    parser = QwenParser(TOOLS)
    assert parser.push_text("<tool_call>\n") == []
    assert parser.push_text("[") == [Text("<tool_call>\n[")]


@pytest.mark.parametrize("name", [None, "get_weather"])
def test_forced_prefix_yields_a_call(name: str | None) -> None:
    parser = QwenParser(TOOLS)
    prefix = forced_prefix(parser, name)
    rest = ' {"city": "Oslo"}}\n</tool_call>' if name else 'get_weather", "arguments": {"city": "Oslo"}}'
    assert arguments_of(parse(parser, [prefix, rest])) == [{"city": "Oslo"}]


def test_hermes_parser_keeps_special_tokens() -> None:
    assert HermesParser.keeps_special_tokens and not QwenParser.keeps_special_tokens
