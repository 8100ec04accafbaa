"""Thoughts and calls of one answer, in order."""

from __future__ import annotations

import pytest

from baton.entrypoints.reasoning_parsers.output_parser import OutputParser
from baton.entrypoints.reasoning_parsers.registry import REASONING_PARSERS
from baton.entrypoints.tool_parsers.pieces import Reasoning, Text
from baton.entrypoints.tool_parsers.registry import TOOL_PARSERS
from tests.doubles.answer_cuts import TOOLS, Expected, arguments_of, check, parse

OSLO = ("get_weather", '{"city": "Oslo"}')
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HARMONY_OSLO = ("get_weather", '{"city": "Oslo", "x": "<|end|>"}')
HARMONY_CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{HARMONY_OSLO[1]}<|call|>"


CASES: dict[str, tuple[str, str, str, Expected]] = {
    "qwen3": (
        "qwen3",
        "qwen",
        f"<think>\nCall?\n{CALL}\n</think>\n\nI look.\n{CALL}\n{CALL}",
        [Reasoning(f"Call?\n{CALL}"), "I look.", OSLO, OSLO],
    ),
    "qwen3, no words": ("qwen3", "qwen", f"<think>\nHm.\n</think>\n\n{CALL}", [Reasoning("Hm."), OSLO]),
    "qwen3, no end": ("qwen3", "qwen", f"<think>\nHm.\n{CALL}", [Reasoning(f"Hm.\n{CALL}")]),
    "qwen3, cut off where both wait": ("qwen3", "qwen", " <", [" <"]),
    "deepseek": (
        "deepseek-r1",
        "deepseekv31",
        'Hm.</think>So<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>',
        [Reasoning("Hm."), "So", OSLO],
    ),
    "an object at the beginning of what is left": (
        "deepseek-r1",
        "llama3",
        'Hm.</think>\n\n{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        [Reasoning("Hm."), OSLO],
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt-oss",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY_CALL}<|start|>assistant{HARMONY_CALL}"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [Reasoning("Hm."), HARMONY_OSLO, HARMONY_OSLO, "Yes."],
    ),
    "gpt-oss, no end of a call": (
        "gpt-oss",
        "gpt-oss",
        f"{HARMONY_CALL.removesuffix('<|call|>')}<|start|>assistant<|channel|>final<|message|>Yes.",
        [HARMONY_OSLO, "Yes."],
    ),
}


def make(reasoning: str, tools: str) -> OutputParser:
    return OutputParser(REASONING_PARSERS[reasoning](), TOOL_PARSERS[tools](TOOLS))


@pytest.mark.parametrize("case", CASES)
def test_reasoning_text_and_calls_come_in_order(case: str) -> None:
    reasoning, tools, text, expected = CASES[case]
    check(lambda: make(reasoning, tools), text, expected)


def test_reasoning_or_tool_parser_may_be_missing() -> None:
    text = f"<think>Hm.</think>{CALL}"
    check(lambda: OutputParser(REASONING_PARSERS["qwen3"]()), text, [Reasoning("Hm."), CALL])
    check(lambda: OutputParser(tools=TOOL_PARSERS["qwen"](TOOLS)), text, ["<think>Hm.</think>", OSLO])
    assert OutputParser().push_text(text) == [Text(text)]


def test_special_tokens_are_kept_if_either_parser_needs_them() -> None:
    assert not make("qwen3", "qwen").keeps_special_tokens
    assert make("qwen3", "hermes").keeps_special_tokens
    assert make("kimi", "qwen").keeps_special_tokens


@pytest.mark.parametrize(
    ("reasoning", "tools", "inside"),
    [("qwen3", "qwen", True), ("qwen3", "qwen", False), ("gpt-oss", "gpt-oss", True), ("gpt-oss", "gpt-oss", False)],
)
def test_forced_call_closes_reasoning_begun_by_the_prompt(reasoning: str, tools: str, inside: bool) -> None:
    parser = OutputParser(REASONING_PARSERS[reasoning](begins_inside=inside), TOOL_PARSERS[tools](TOOLS))
    prefix = parser.forced_prefix("get_weather")
    pieces = parse(parser, [prefix, '{"city": "Oslo"}'])
    assert arguments_of(pieces) == [{"city": "Oslo"}]
    assert len(pieces) == 2


def test_no_call_can_be_forced_without_a_tool_parser() -> None:
    with pytest.raises(ValueError, match="--tool-call-parser"):
        OutputParser(REASONING_PARSERS["qwen3"]()).forced_prefix(None)
