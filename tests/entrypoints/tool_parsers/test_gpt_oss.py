"""Calls of gpt-oss: messages to functions."""

from __future__ import annotations

import pytest

from baton.entrypoints.tool_parsers.harmony import GptOssParser
from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Text, forced_prefix
from tests.doubles.answer_cuts import TOOLS, Expected, arguments_of, check, check_every_beginning, parse

OSLO = ("get_weather", '{"city": "Oslo"}')
HEADER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
CALL = HEADER + '{"city": "Oslo"}<|call|>'
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"

CASES: dict[str, tuple[str, Expected]] = {
    "a call": (CALL, [OSLO]),
    "without its end": (CALL.removesuffix("<|call|>"), [OSLO]),
    "thoughts become text": (
        f"<|channel|>analysis<|message|>Hm.<|end|>{NEXT}{CALL}",
        ["Hm.", OSLO],
    ),
    "an answer": (f"{FINAL}Hello <b>!<|return|>", ["Hello <b>!"]),
    "words, a call": (f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}", ["I look.", OSLO]),
    "several": (f"{CALL}{NEXT}{CALL}\n{NEXT}{FINAL}ok", [OSLO, OSLO, "ok"]),
    "no end between": (f"{CALL.removesuffix('<|call|>')}{NEXT}{CALL}", [OSLO, OSLO]),
    "no start between": (f"{FINAL}a{CALL}", ["a", OSLO]),
    "the recipient in the role": (
        f'{NEXT} to=functions.get_weather<|channel|>commentary<|message|>{{"city": "Oslo"}}<|end|>',
        [OSLO],
    ),
    "a header that begins in the prompt": (
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
        [OSLO],
    ),
    "on the channel of thoughts": (
        '<|channel|>analysis to=functions.get_weather<|message|>{"city": "Oslo"}<|call|>',
        [OSLO],
    ),
    "a tool without its namespace": (
        '<|channel|>commentary to=get_weather<|message|>{"city": "Oslo"}<|call|>',
        [OSLO],
    ),
    "an unknown tool": ("<|channel|>commentary to=functions.a.b<|message|>{}<|call|>", [("a.b", "{}")]),
    "marks in strings": (
        f'{HEADER}\n{{"x": {{"y": "<|call|>{CALL[:9]}\\"}}"}}}}<|call|>{NEXT}{FINAL}ok',
        [("get_weather", f'{{"x": {{"y": "<|call|>{CALL[:9]}\\"}}"}}}}'), "ok"],
    ),
    "no arguments": (f"{HEADER}<|call|>{NEXT}{FINAL}ok", [("get_weather", "{}"), "ok"]),
    "words behind the arguments": (
        f'{HEADER}{{"city": "Oslo"}} so<|call|>{NEXT}{CALL}',
        [OSLO, " so", OSLO],
    ),
    "a bracket short": (f'{HEADER}{{"x": {{"y": 1}}<|call|>{NEXT}{CALL}', [("get_weather", '{"x": {"y": 1}'), OSLO]),
    "no object": (f"{HEADER}ls<|call|>{NEXT}{CALL}", [f"{HEADER}ls<|call|>", OSLO]),
    "to a tool that is built in": (
        f"<|channel|>commentary to=python code<|message|>1 + 1<|call|>{NEXT}{FINAL}2",
        ["<|channel|>commentary to=python code<|message|>1 + 1<|call|>", "2"],
    ),
    "to a tool that is built in, in thoughts": (
        "<|channel|>analysis to=python code<|message|>1 + 1",
        ["<|channel|>analysis to=python code<|message|>1 + 1"],
    ),
    "to no function": ("<|channel|>x to=functions.<|message|>{}", ["<|channel|>x to=functions.<|message|>{}"]),
    "no recipient": ("<|channel|>commentary auto=functions.a<|message|>{}", ["{}"]),
    "no marks": ("Hello <|im_end|>\nto=functions.a", ["Hello <|im_end|>\nto=functions.a"]),
    "marks without a message": ("a<|end|><|message|>b<|channel|>final", ["a<|end|><|message|>b<|channel|>final"]),
    "a header in a header": (f"<|channel|>x{NEXT}{CALL}", [f"<|channel|>x{NEXT}", OSLO]),
    "a message that ends in its header": (f"<|channel|>final<|end|>{NEXT}{CALL}", ["<|channel|>final<|end|>", OSLO]),
    "cut off": (f'{HEADER}{{"x": "', [("get_weather", '{"x": "')]),
    "cut off before the arguments": (HEADER, [("get_weather", "")]),
    "cut off header": (HEADER[:-1], [HEADER[:-1]]),
    "whitespace": (" \n", [" \n"]),
}


@pytest.mark.parametrize("case", CASES)
def test_pieces_do_not_depend_on_chunking(case: str) -> None:
    check(lambda: GptOssParser(TOOLS), *CASES[case])


@pytest.mark.parametrize("case", ["several", "marks in strings"])
def test_every_answer_prefix_is_parsed(case: str) -> None:
    check_every_beginning(lambda: GptOssParser(TOOLS), CASES[case][0])


def test_arguments_are_streamed_as_they_arrive() -> None:
    parser = GptOssParser(TOOLS)
    assert parser.push_text(HEADER) == []
    assert parser.push_text("{") == [CallBegins(0, "get_weather"), CallArguments(0, "{")]
    assert parser.push_text('"<|') == [CallArguments(0, '"<|')]


def test_text_is_streamed_as_it_arrives() -> None:
    parser = GptOssParser(TOOLS)
    assert parser.push_text("to=5 is") == [Text("to=5 is")]
    assert parser.push_text(f"{FINAL}a <|") == [Text("a ")]
    assert parser.push_text("x") == [Text("<|x")]


@pytest.mark.parametrize("name", [None, "get_weather"])
def test_forced_prefix_yields_a_call(name: str | None) -> None:
    parser = GptOssParser(TOOLS)
    rest = '{"city": "Oslo"}' if name else 'get_weather <|constrain|>json<|message|>{"city": "Oslo"}'
    assert arguments_of(parse(parser, [forced_prefix(parser, name), rest])) == [{"city": "Oslo"}]
