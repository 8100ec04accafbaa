"""Calls as Python."""

from __future__ import annotations

import pytest

from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Text, forced_prefix
from baton.entrypoints.tool_parsers.pythonic import PythonicParser
from tests.doubles.answer_cuts import TOOLS, Expected, arguments_of, check, check_every_beginning, parse

OSLO = ("get_weather", '{"city": "Oslo"}')
CALL = "[get_weather(city='Oslo')]"

CASES: dict[str, tuple[str, Expected]] = {
    "a call": (CALL, [OSLO]),
    "several": (
        "[get_weather(city='Oslo'), list_files(),\n get_weather(city = \"Oslo\" )]\n",
        [OSLO, ("list_files", "{}"), OSLO],
    ),
    "values": (
        '[get_weather(city="a, )]\\"", days=-2, wanted=[\'x\', ("y",)], units=None, more={"a": {\'b\': True}})]',
        [
            (
                "get_weather",
                '{"city": "a, )]\\"", "days": -2, "wanted": ["x", ["y"]], "units": null, "more": {"a": {"b": true}}}',
            )
        ],
    ),
    "quotes": (
        """[write_file(path='', content='''a 'b' ,)\\'''' ), write_file(path="'", content=\"""x\n"y" \""")]""",
        [
            ("write_file", """{"path": "", "content": "a 'b' ,)'"}"""),
            ("write_file", """{"path": "'", "content": "x\\n\\"y\\" "}"""),
        ],
    ),
    "a lone quote in a long string": (
        "[write_file(content='''it's, (x''', path=''), list_files()]",
        [("write_file", '{"content": "it\'s, (x", "path": ""}'), ("list_files", "{}")],
    ),
    "values that are no literals": (
        "[get_weather(city=home(1, 'a'), days=1 + 2, wanted=x==y)]",
        [("get_weather", '{"city": "home(1, \'a\')", "days": "1 + 2", "wanted": "x==y"}')],
    ),
    "values without keywords": (
        "[get_weather('Oslo', 3, units='C'), list_files('a', b == 1)]",
        [
            ("get_weather", '{"city": "Oslo", "days": 3, "units": "C"}'),
            ("list_files", '{"argument0": "a", "argument1": "b == 1"}'),
        ],
    ),
    "a comma at the end": ("[get_weather(city='Oslo',)]", [OSLO]),
    "a keyword without a value": ("[get_weather(city=)]", [("get_weather", '{"city": ""}')]),
    "words around": (f"Sure [1]:\n  {CALL} ok", ["Sure [1]:\n  ", OSLO, " ok"]),
    "two lists": (f"{CALL}\n{CALL}", [OSLO, OSLO]),
    "a list in a line": (f"Sure: {CALL}\n{CALL}", [f"Sure: {CALL}\n", OSLO]),
    "marked": (
        f"Sure: <|python_start|>{CALL}<|python_end|> ok\n{CALL}",
        ["Sure: ", OSLO, " ok\n", OSLO],
    ),
    "marked, an unknown tool": ("<|python_start|> [a.b(x=1)]<|python_end|>", [("a.b", '{"x": 1}')]),
    "marked, no list": ("<|python_start|>print(1)", ["<|python_start|>print(1)"]),
    "an unknown tool second": ("[list_files(), nope(x=1)]", [("list_files", "{}"), ("nope", '{"x": 1}')]),
    "an unknown tool": ("[nope(city='Oslo')]", ["[nope(city='Oslo')]"]),
    "a list of numbers": (" [1, 2]\n", [" [1, 2]\n"]),
    "a tool that is not called": ("[get_weather, list_files]", ["[get_weather, list_files]"]),
    "a list after a list of numbers": (f"[1]\n{CALL}", ["[1]\n", OSLO]),
    "no list after a call": ("[list_files(), 5]", [("list_files", "{}"), ", 5]"]),
    "no end of the list": ("[list_files() ok", [("list_files", "{}"), " ok"]),
    "no end of the call": ("[get_weather(city='Oslo'] ok", [OSLO, " ok"]),
    "cut off string": ("[get_weather(days=1, city='Os\\'l", [("get_weather", '{"days": 1, "city": "Os\'l')]),
    "cut off long string": ('[get_weather(city="""Os"l', [("get_weather", '{"city": "Os\\"l')]),
    "cut off in an escape": ("[get_weather(city='Os\\", [("get_weather", '{"city": "Os\\\\')]),
    "cut off number": ("[get_weather(days=1", [("get_weather", '{"days": 1')]),
    "cut off keyword": ("[get_weather(city=", [("get_weather", '{"city": ')]),
    "cut off before a keyword": ("[get_weather(", [("get_weather", "")]),
    "cut off behind a call": ("[list_files(), ", [("list_files", "{}"), ", "]),
    "cut off behind the last call": ("[list_files() ", [("list_files", "{}")]),
    "cut off name": ("[get_wea", ["[get_wea"]),
    "whitespace": (" \n", [" \n"]),
}


@pytest.mark.parametrize("case", CASES)
def test_pieces_do_not_depend_on_chunking(case: str) -> None:
    check(lambda: PythonicParser(TOOLS), *CASES[case])


@pytest.mark.parametrize("case", ["several", "values", "quotes", "values without keywords"])
def test_every_answer_prefix_is_parsed(case: str) -> None:
    check_every_beginning(lambda: PythonicParser(TOOLS), CASES[case][0])


@pytest.mark.parametrize("case", ["several", "values", "quotes", "values without keywords"])
def test_parsed_arguments_are_json(case: str) -> None:
    assert all(isinstance(each, dict) for each in arguments_of(parse(PythonicParser(TOOLS), [CASES[case][0]])))


def test_argument_is_emitted_when_complete() -> None:
    parser = PythonicParser(TOOLS)
    assert parser.push_text("[get_weather") == []
    assert parser.push_text("(") == [CallBegins(0, "get_weather")]
    assert parser.push_text("days=1") == []
    assert parser.push_text(",") == [CallArguments(0, '{"days": 1')]
    assert parser.push_text(" city='a,'") == []
    assert parser.push_text(")") == [CallArguments(0, ', "city": "a,"}')]


def test_unambiguous_text_is_not_held_back() -> None:
    parser = PythonicParser(TOOLS)
    assert parser.push_text("a [") == [Text("a [")]
    assert parser.push_text("get_weather(\n[ge") == [Text("get_weather(\n")]
    assert parser.push_text("n") == [Text("[gen")]


@pytest.mark.parametrize("name", [None, "get_weather"])
def test_forced_prefix_yields_a_call(name: str | None) -> None:
    parser = PythonicParser(TOOLS)
    rest = "city='Oslo')]" if name else "get_weather(city='Oslo')]"
    assert arguments_of(parse(parser, [forced_prefix(parser, name), rest])) == [{"city": "Oslo"}]
