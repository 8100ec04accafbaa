"""Mistral's calls, in both forms."""

from __future__ import annotations

import pytest

from baton.entrypoints.tool_parsers.mistral import MistralArgsParser, MistralParser
from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Text, forced_prefix
from tests.doubles.answer_cuts import TOOLS, Expected, arguments_of, check, check_every_beginning, parse

OSLO = ("get_weather", '{"city": "Oslo"}')
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "a1b2c3d4e"}'
NAMED = '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}'

CASES: dict[str, tuple[str, Expected]] = {
    "a list": (f"[TOOL_CALLS] [{CALL}]", [OSLO]),
    "several": (f"Hm.[TOOL_CALLS][{CALL}, {CALL},\n{CALL} ]\nok", ["Hm.", OSLO, OSLO, OSLO, "\nok"]),
    "one without a list": (f"[TOOL_CALLS] {CALL}", [OSLO]),
    "a list twice": (f"[TOOL_CALLS] [{CALL}] [TOOL_CALLS] [{CALL}]", [OSLO, OSLO]),
    "the mark in a string": (
        '[TOOL_CALLS] [{"name": "a", "arguments": {"x": "[TOOL_CALLS] [\\"", "y": []}}]',
        [("a", '{"x": "[TOOL_CALLS] [\\"", "y": []}')],
    ),
    "no end of the list": (f"[TOOL_CALLS] [{CALL}\n", [OSLO]),
    "no end of the list, and more": (f"[TOOL_CALLS] [{CALL} [TOOL_CALLS] [{CALL}]", [OSLO, OSLO]),
    "no end of the list, and words": (f"[TOOL_CALLS] [{CALL} so", [OSLO, " so"]),
    "words in the list": (f"[TOOL_CALLS] [{CALL}, so {NAMED}", [OSLO, ", so ", OSLO]),
    "an object that is no call in the list": (
        f'[TOOL_CALLS] [{CALL}, {{"a": 1}}] so',
        [OSLO, ', {"a": 1}] so'],
    ),
    "an empty list": ("[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
    "named": (NAMED, [OSLO]),
    "several named": (f"Hm.{NAMED}{NAMED}\n{NAMED}\nok", ["Hm.", OSLO, OSLO, OSLO, "\nok"]),
    "named with an id": ('[TOOL_CALLS]get_weather[CALL_ID]a1b2c3[ARGS]{"city": "Oslo"}', [OSLO]),
    "named without a mark": ('[TOOL_CALLS]get_weather{"city": "Oslo"}', [OSLO]),
    "named, nested": (
        '[TOOL_CALLS]a[ARGS]{"x": {"y": "}[TOOL_CALLS]"}} ok',
        [("a", '{"x": {"y": "}[TOOL_CALLS]"}}'), " ok"],
    ),
    "named, cut off": ('[TOOL_CALLS]get_weather[ARGS]{"ci', [("get_weather", '{"ci')]),
    "named, cut off before": ("[TOOL_CALLS]get_weather[ARGS]", [("get_weather", "")]),
    "named, cut off in the name": ("a[TOOL_CALLS]get_wea", ["a[TOOL_CALLS]get_wea"]),
    "named, without arguments": ("[TOOL_CALLS]get_weather[ARGS] no", ["[TOOL_CALLS]get_weather[ARGS] no"]),
    "no name": ('[TOOL_CALLS][ARGS]{"x": 1}', ['[TOOL_CALLS][ARGS]{"x": 1}']),
    "words": ("[TOOL_CALLS] I call it. [TOOL", ["[TOOL_CALLS] I call it. [TOOL"]),
    "the mark twice": (f"[TOOL_CALLS]{NAMED}", ["[TOOL_CALLS]", OSLO]),
    "cut off": ('[TOOL_CALLS] [{"name": "a", "arguments": {"x": [1', [("a", '{"x": [1')]),
}


@pytest.mark.parametrize("case", CASES)
def test_pieces_do_not_depend_on_chunking(case: str) -> None:
    check(lambda: MistralParser(TOOLS), *CASES[case])


@pytest.mark.parametrize("case", ["several", "several named"])
def test_every_answer_prefix_is_parsed(case: str) -> None:
    check_every_beginning(lambda: MistralParser(TOOLS), CASES[case][0])


def test_unambiguous_text_is_not_held_back() -> None:
    parser = MistralParser(TOOLS)
    assert parser.push_text("[TOOLS] [TOOL_CALLS") == [Text("[TOOLS] ")]
    assert parser.push_text('] [{"name": "a", "arguments": ') == []
    assert parser.push_text("{") == [CallBegins(0, "a"), CallArguments(0, "{")]
    assert parser.push_text('"[T') == [CallArguments(0, '"[T')]


@pytest.mark.parametrize("make", [MistralParser, MistralArgsParser])
@pytest.mark.parametrize("name", [None, "get_weather"])
def test_forced_prefix_yields_a_call(make: type[MistralParser], name: str | None) -> None:
    parser = make(TOOLS)
    before, after = ("[ARGS]", "") if make is MistralArgsParser else ('", "arguments":', "}]")
    rest = ' {"city": "Oslo"}' if name else f'get_weather{before} {{"city": "Oslo"}}'
    assert arguments_of(parse(parser, [forced_prefix(parser, name), rest + after])) == [{"city": "Oslo"}]
