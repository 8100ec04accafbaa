"""Qwen3-Coder's calls: tags, with values as bare text."""

from __future__ import annotations

import json

import pytest

from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Text, forced_prefix
from baton.entrypoints.tool_parsers.qwen3_coder import Qwen3CoderParser
from tests.doubles.answer_cuts import TOOLS, Expected, arguments_of, check, check_every_beginning, parse

CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
OSLO = ("get_weather", '{"city": "Oslo"}')
EMPTY = "<tool_call>\n<function=list_files>\n</function>\n</tool_call>"
PROGRAM = 'def f(x):\n    return "<parameter=x>" if x < 3 else "</function>"\n\n# ü {}'

CASES: dict[str, tuple[str, Expected]] = {
    "a call": (CALL, [OSLO]),
    "words around": (f"I look.\n\n{CALL}\nDone.", ["I look.\n", OSLO, "\nDone."]),
    "several": (f"{CALL}\n{EMPTY}{CALL}\n", [OSLO, ("list_files", "{}"), OSLO]),
    "types": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
        '<parameter=units>\nnull\n</parameter>\n<parameter=wanted>\n["rain", "a \\" b"]\n</parameter>\n</function>\n'
        "</tool_call>",
        [("get_weather", '{"city": "12", "days": 12, "units": null, "wanted": ["rain", "a \\" b"]}')],
    ),
    "a program": (
        f"<tool_call>\n<function=write_file>\n<parameter=path>\na b.py\n</parameter>\n<parameter=content>\n{PROGRAM}\n"
        "\n</parameter>\n</function>\n</tool_call>",
        [("write_file", json.dumps({"path": "a b.py", "content": PROGRAM + "\n"}, ensure_ascii=False))],
    ),
    "a value that begins with whitespace": (
        "<tool_call><function=write_file><parameter=content>\n\n  x\n</parameter></function></tool_call>",
        [("write_file", '{"content": "\\n  x"}')],
    ),
    "an empty value": (
        "<tool_call><function=write_file><parameter=path></parameter><parameter=content>\n</parameter></function>",
        [("write_file", '{"path": "", "content": ""}')],
    ),
    "no line breaks": (
        "<tool_call><function=get_weather><parameter=city>Oslo</parameter><parameter=days>2</parameter></function>"
        "</tool_call>",
        [("get_weather", '{"city": "Oslo", "days": 2}')],
    ),
    "parameters that are not closed": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n2\n</function>\n</tool_call>ok",
        [("get_weather", '{"city": "Oslo", "days": 2}'), "ok"],
    ),
    "a function that is not closed": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</tool_call>\nok",
        [OSLO, "\nok"],
    ),
    "words in a function": (
        "<tool_call>\n<function=list_files>\nno parameters </tool_call>",
        [("list_files", "{}"), "\nno parameters </tool_call>"],
    ),
    "a parameter closed twice": (
        "<tool_call><function=get_weather><parameter=city>Oslo</parameter></parameter></function></tool_call>",
        [OSLO],
    ),
    "no outer tag": (
        f"Now:\n{CALL[12:]}\n<function=list_files></function>",
        ["Now:", OSLO, ("list_files", "{}")],
    ),
    "no outer tag, no tool": ("\n<function=nope>\n</function>", ["\n<function=nope>\n</function>"]),
    "an unknown tool": ("<tool_call><function=nope>\n<parameter=a>1</parameter></function>", [("nope", '{"a": "1"}')]),
    "two functions in a block": (
        "<tool_call><function=list_files></function>\n<function=list_files></function></tool_call>",
        [("list_files", "{}"), ("list_files", "{}")],
    ),
    "cut off value": (
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nOs"l\n</param',
        [("get_weather", '{"city": "Os\\"l\\n</param')],
    ),
    "cut off number": ("<tool_call>\n<function=get_weather>\n<parameter=days>\n1", [("get_weather", '{"days": 1')]),
    "cut off parameter": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=da",
        [("get_weather", '{"city": "Oslo", "da')],
    ),
    "cut off function": ("<tool_call>\n<function=get_weather>\n", [("get_weather", "")]),
    "cut off name": ("a\n<tool_call>\n<function=get_wea", ["a\n<tool_call>\n<function=get_wea"]),
    "no function": ("<tool_call>\n<fun>ction=a>", ["<tool_call>\n<fun>ction=a>"]),
    "no name": ("<tool_call>\n<function=>\n", ["<tool_call>\n<function=>\n"]),
    "a name with a space": ("<tool_call><function=a b></function>", ["<tool_call><function=a b></function>"]),
    "garbage, then a call": (f"<tool_call>\n{CALL}", ["<tool_call>\n", OSLO]),
}


@pytest.mark.parametrize("case", CASES)
def test_pieces_do_not_depend_on_chunking(case: str) -> None:
    check(lambda: Qwen3CoderParser(TOOLS), *CASES[case])


def test_every_answer_prefix_is_parsed() -> None:
    check_every_beginning(lambda: Qwen3CoderParser(TOOLS), CASES["types"][0] + CASES["words around"][0])


def test_argument_is_emitted_when_complete() -> None:
    parser = Qwen3CoderParser(TOOLS)
    assert parser.push_text("<b>\n") == [Text("<b>")]
    assert parser.push_text("<tool_call>\n<function=get_weather") == []
    assert parser.push_text(">") == [CallBegins(0, "get_weather")]
    assert parser.push_text("\n<parameter=city>\nOslo\n</parameter") == []
    assert parser.push_text(">") == [CallArguments(0, '{"city": "Oslo"')]
    assert parser.push_text("\n</function>") == [CallArguments(0, "}")]


@pytest.mark.parametrize("name", [None, "get_weather"])
def test_forced_prefix_yields_a_call(name: str | None) -> None:
    parser = Qwen3CoderParser(TOOLS)
    rest = "" if name else "get_weather>\n"
    text = "<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    assert arguments_of(parse(parser, [forced_prefix(parser, name), rest, text])) == [{"city": "Oslo"}]
