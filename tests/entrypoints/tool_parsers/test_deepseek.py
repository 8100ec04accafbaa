"""DeepSeek's calls, in both forms."""

from __future__ import annotations

import pytest

from baton.entrypoints.tool_parsers.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Text, forced_prefix
from tests.doubles.answer_cuts import TOOLS, Expected, arguments_of, check, check_every_beginning, parse

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
OSLO = ("get_weather", '{"city": "Oslo"}')
V3 = f'{CALL}function{SEPARATOR}get_weather\n```json\n{{"city": "Oslo"}}\n```{CALL_END}'
V31 = f'{CALL}get_weather{SEPARATOR}{{"city": "Oslo"}}{CALL_END}'
ODD = '{"x": {"y": ["```", "<｜tool▁call▁end｜>", "\\"}"]}}'

CASES: dict[str, tuple[str, Expected]] = {
    "V3": (f"{BEGIN}{V3}{END}", [OSLO]),
    "V3.1": (f"{BEGIN}{V31}{END}", [OSLO]),
    "V3, several": (f"Hm.{BEGIN}{V3}\n{V3}\n{V3}\n{END} ok", ["Hm.", OSLO, OSLO, OSLO, " ok"]),
    "V3.1, several": (f"Hm.\n{BEGIN}{V31}{V31}{END}\n", ["Hm.\n", OSLO, OSLO]),
    "twice": (f"{BEGIN}{V31}{END}\n{BEGIN}{V31}{END}", [OSLO, OSLO]),
    "no outer marks": (f"{V3}\n{V31}\nok", [OSLO, OSLO, "\nok"]),
    "a line break between the marks": (f"{BEGIN}\n{V3}", [OSLO]),
    "V3, marks in strings": (
        f"{CALL}function{SEPARATOR}a\n```json\n{ODD}\n```{CALL_END}ok",
        [("a", ODD), "ok"],
    ),
    "V3.1, marks in strings": (f"{CALL}a{SEPARATOR}{ODD}{CALL_END}ok", [("a", ODD), "ok"]),
    "V3 without a code block": (f'{CALL}function{SEPARATOR}a\n{{"x": 1}}{CALL_END}', [("a", '{"x": 1}')]),
    "V3 on one line": (f'{CALL}function{SEPARATOR}a```json{{"x": 1}}```{CALL_END}', [("a", '{"x": 1}')]),
    "V3.1 with a line break": (f'{CALL}a{SEPARATOR}\n{{"x": 1}}\n{CALL_END}', [("a", '{"x": 1}')]),
    "no arguments": (f"{CALL}a{SEPARATOR}{CALL_END}{CALL}function{SEPARATOR}b\n{CALL_END}", [("a", "{}"), ("b", "{}")]),
    "a bracket short": (f'{CALL}a{SEPARATOR}{{"x": {{"y": 1}}{CALL_END}{V31}', [("a", '{"x": {"y": 1}'), OSLO]),
    "calls that are not closed": (
        f'{CALL}a{SEPARATOR}{{"x": 1}}\n{V31[:-len(CALL_END)]}{END}ok',
        [("a", '{"x": 1}'), OSLO, "ok"],
    ),
    "words behind the arguments": (f'{CALL}a{SEPARATOR}{{"x": 1}} so{V31}', [("a", '{"x": 1}'), " so", OSLO]),
    "no call behind the outer mark": (f"{BEGIN} no {END}", [f"{BEGIN} no {END}"]),
    "the outer mark twice": (f"{BEGIN}{BEGIN}{V31}", [BEGIN, OSLO]),
    "no separator": (f"{CALL}get_weather{CALL_END}{V31}", [f"{CALL}get_weather{CALL_END}", OSLO]),
    "no name": (f"{CALL}{SEPARATOR}{{}}{CALL_END}", [f"{CALL}{SEPARATOR}{{}}{CALL_END}"]),
    "no object": (f"{CALL}a{SEPARATOR}5{CALL_END}", [f"{CALL}a{SEPARATOR}5{CALL_END}"]),
    "cut off": (f'{BEGIN}{CALL}a{SEPARATOR}{{"x": "', [("a", '{"x": "')]),
    "V3, cut off before the arguments": (
        f"{CALL}function{SEPARATOR}a\n```js",
        [f"{CALL}function{SEPARATOR}a\n```js"],
    ),
    "V3, cut off in the code block's mark": (f"{CALL}function{SEPARATOR}a\n```", [("a", "")]),
    "V3, cut off at the arguments": (f"{BEGIN}{CALL}function{SEPARATOR}a\n```json\n", [("a", "")]),
    "V3.1, cut off at the arguments": (f"{BEGIN}{CALL}a{SEPARATOR}", [("a", "")]),
    "V3, cut off name": (f"{BEGIN}{CALL}function{SEPARATOR}get_w", [f"{BEGIN}{CALL}function{SEPARATOR}get_w"]),
    "V3, cut off before the name": (f"{CALL}function{SEPARATOR}", [f"{CALL}function{SEPARATOR}"]),
    "V3.1, cut off name": (f"{BEGIN}{CALL}get_w", [f"{BEGIN}{CALL}get_w"]),
    "no marks": ("a < b <｜tool <tool_call>", ["a < b <｜tool <tool_call>"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_pieces_do_not_depend_on_chunking(case: str) -> None:
    check(lambda: DeepSeekV3Parser(TOOLS), *CASES[case])


@pytest.mark.parametrize("case", ["V3, several", "V3.1, several", "V3, marks in strings"])
def test_every_answer_prefix_is_parsed(case: str) -> None:
    check_every_beginning(lambda: DeepSeekV3Parser(TOOLS), CASES[case][0])


def test_arguments_are_streamed_as_they_arrive() -> None:
    parser = DeepSeekV31Parser(TOOLS)
    assert parser.push_text(f"a<{CALL}a{SEPARATOR}") == [Text("a<")]
    assert parser.push_text("{") == [CallBegins(0, "a"), CallArguments(0, "{")]
    assert parser.push_text('"<｜') == [CallArguments(0, '"<｜')]


@pytest.mark.parametrize("make", [DeepSeekV3Parser, DeepSeekV31Parser])
@pytest.mark.parametrize("name", [None, "get_weather"])
def test_forced_prefix_yields_a_call(make: type[DeepSeekV3Parser], name: str | None) -> None:
    parser = make(TOOLS)
    before = f"get_weather{SEPARATOR}" if make is DeepSeekV31Parser else "get_weather\n```json\n"
    rest = f'{"" if name else before}{{"city": "Oslo"}}'
    assert arguments_of(parse(parser, [forced_prefix(parser, name), rest])) == [{"city": "Oslo"}]
