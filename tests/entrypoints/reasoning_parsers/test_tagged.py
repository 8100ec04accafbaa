"""Thoughts between tags."""

from __future__ import annotations

import pytest

from baton.entrypoints.reasoning_parsers.tagged import (
    DeepSeekR1Parser,
    KimiParser,
    MistralReasoningParser,
    TaggedParser,
)
from baton.entrypoints.tool_parsers.pieces import Reasoning, Text
from tests.doubles.answer_cuts import Expected, check

CALL = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'

OUTSIDE: dict[str, tuple[str, Expected]] = {
    "a thought": ("<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), "Yes."]),
    "no line breaks": ("<think>Hm.</think>Yes.", [Reasoning("Hm."), "Yes."]),
    "one line break": ("<think>Hm.</think>\nYes.", [Reasoning("Hm."), "Yes."]),
    "more line breaks than templates write": (
        "<think>\n\nHm.\n\n</think>\n\n\nYes.\n",
        [Reasoning("\nHm.\n"), "\nYes.\n"],
    ),
    "spaces stay": ("<think> Hm. </think> Yes.", [Reasoning(" Hm. "), " Yes."]),
    "an empty thought": ("<think>\n\n</think>\n\nYes.", ["Yes."]),
    "whitespace before": ("\n \n<think>Hm.</think>Yes.", [Reasoning("Hm."), "Yes."]),
    "no thought": (" Yes.\n", [" Yes.\n"]),
    "no end": ("<think>\nHm.\nNo.\n", [Reasoning("Hm.\nNo.\n")]),
    "a cut off end": ("<think>Hm.\n</thi", [Reasoning("Hm.\n</thi")]),
    "a cut off start": ("<thin", ["<thin"]),
    "a thought twice": ("<think>a</think>b<think>c</think>d", [Reasoning("a"), "b<think>c</think>d"]),
    "a start in a thought": ("<think>a<think>b</think>c</think>d", [Reasoning("a<think>b"), "c</think>d"]),
    "words before": ("A <think> tag </think> is one.", ["A <think> tag </think> is one."]),
    "no start": ("Hm.</think>Yes.", ["Hm.</think>Yes."]),
    "a call in a thought": (f"<think>{CALL}</think>{CALL}", [Reasoning(CALL), CALL]),
    "a call in a thought without an end": (f"<think>Hm.\n{CALL}", [Reasoning(f"Hm.\n{CALL}")]),
    "nothing": ("", []),
    "whitespace": (" \n", [" \n"]),
}
INSIDE: dict[str, tuple[str, Expected]] = {
    "a thought": ("Hm.\n</think>\n\nYes.", [Reasoning("Hm."), "Yes."]),
    "a start again": ("<think>\nHm.</think>Yes.", [Reasoning("Hm."), "Yes."]),
    "a start again after whitespace": (" \n<think>Hm.</think>Yes.", [Reasoning("Hm."), "Yes."]),
    "a line break": ("\n\nHm.</think>Yes.", [Reasoning("\nHm."), "Yes."]),
    "no thought": ("</think>Yes.", ["Yes."]),
    "no thought but a line break": ("\n</think>\n\nYes.", ["Yes."]),
    "no end": ("Hm. <th", [Reasoning("Hm. <th")]),
    "an end twice": ("a</think>b</think>c", [Reasoning("a"), "b</think>c"]),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_answer_may_begin_outside_reasoning(case: str) -> None:
    check(TaggedParser, *OUTSIDE[case])
    check(lambda: DeepSeekR1Parser(begins_inside=False), *OUTSIDE[case])


@pytest.mark.parametrize("case", INSIDE)
def test_answer_may_begin_inside_reasoning(case: str) -> None:
    check(lambda: TaggedParser(begins_inside=True), *INSIDE[case])
    check(DeepSeekR1Parser, *INSIDE[case])


@pytest.mark.parametrize("make", [KimiParser, MistralReasoningParser])
def test_kimi_and_mistral_reasoning_tags(make: type[TaggedParser]) -> None:
    check(make, f"{make.start}Hm.{make.end}Yes.", [Reasoning("Hm."), "Yes."])
    assert make.keeps_special_tokens
    assert (KimiParser.start, KimiParser.end) == ("◁think▷", "◁/think▷")
    assert (MistralReasoningParser.start, MistralReasoningParser.end) == ("[THINK]", "[/THINK]")


def test_unambiguous_text_is_not_held_back() -> None:
    parser = TaggedParser()
    assert parser.push_text("<think") == []
    assert parser.push_text(">a < b") == [Reasoning("a < b")]
    assert parser.push_text("\n<") == []
    assert parser.push_text("/b") == [Reasoning("\n</b")]
    assert parser.push_text("\n</think>") == []
    assert parser.push_text("\n") == []
    assert parser.push_text("\n") == []
    assert parser.push_text("\n<") == [Text("\n<")]
    assert TaggedParser().push_text("a") == [Text("a")]


def test_held_back_text_is_bounded() -> None:
    parser = TaggedParser(begins_inside=True)
    for character in "\n</think" * 25_000:
        parser.push_text(character)
        assert parser.reader.held <= len("\n</think>")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<think>a</think>b<|im_start|>assistant\n<think>Well", True),
        ("<｜Assistant｜></think>", False),
    ],
)
def test_reasoning_opened_by_the_prompt_is_detected(prompt: str, expected: bool) -> None:
    assert TaggedParser.begins_inside(prompt) is expected
