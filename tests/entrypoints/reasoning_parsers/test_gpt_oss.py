"""Thoughts of gpt-oss: messages on a channel."""

from __future__ import annotations

import pytest

from baton.entrypoints.reasoning_parsers.gpt_oss import GptOssReasoningParser
from baton.entrypoints.tool_parsers.pieces import Reasoning, Text
from tests.doubles.answer_cuts import Expected, check

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
CALL = '<|channel|>commentary to=functions.a <|constrain|>json<|message|>\n{"x": "<|end|>{"}<|call|>'
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"

CASES: dict[str, tuple[str, Expected]] = {
    "an answer": (f"{THOUGHT}{NEXT}{FINAL}Yes.<|return|>", [Reasoning("Hm."), "Yes."]),
    "a call stays as it is": (f"{THOUGHT}{NEXT}{CALL}", [Reasoning("Hm."), NEXT + CALL]),
    "a call without its end": (f"{CALL[:-8]}{NEXT}{FINAL}Yes.", [f"{CALL[:-8]}Yes."]),
    "a bracket short": (
        f'<|channel|>x to=functions.a<|message|>{{"x": {{<|call|>{NEXT}{THOUGHT}',
        ['<|channel|>x to=functions.a<|message|>{"x": {<|call|>', Reasoning("Hm.")],
    ),
    "a call that is cut off": (CALL[:-12], [CALL[:-12]]),
    "a call with marks of messages in a string": (
        f'{FINAL}a{NEXT}<|channel|>x to=functions.a<|message|>{{"y": "{THOUGHT}"}}<|call|>',
        [f'a{NEXT}<|channel|>x to=functions.a<|message|>{{"y": "{THOUGHT}"}}<|call|>'],
    ),
    "another thought": (
        f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{THOUGHT}{NEXT}{FINAL}Yes.",
        [Reasoning("Hm."), "I look.", Reasoning("Hm."), "Yes."],
    ),
    "a thought without an end": ("<|channel|>analysis<|message|>Hm. <|", [Reasoning("Hm. <|")]),
    "no marks": ("Yes.", ["Yes."]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_pieces_do_not_depend_on_chunking(case: str) -> None:
    check(GptOssReasoningParser, *CASES[case])


def test_answer_may_begin_inside_reasoning() -> None:
    check(
        lambda: GptOssReasoningParser(begins_inside=True),
        f"Hm.<|end|>{NEXT}{FINAL}Yes.",
        [Reasoning("Hm."), "Yes."],
    )
    assert GptOssReasoningParser.begins_inside("<|start|>assistant<|channel|>analysis<|message|>")
    assert not GptOssReasoningParser.begins_inside(f"{THOUGHT}<|start|>assistant")


def test_reasoning_is_streamed_as_it_arrives() -> None:
    parser = GptOssReasoningParser()
    assert parser.push_text("<|channel|>analysis<|message|>H") == [Reasoning("H")]
    assert parser.push_text(f"<|end|>{NEXT}{FINAL}Y") == [Text("Y")]
