"""Which parsers read an answer, and what they are told of the prompt."""

from __future__ import annotations

import re
from typing import Any

import pytest

from baton.entrypoints.chat.answer_parsers import AnswerParsers, first_call_only
from baton.entrypoints.openai.chat import parse_chat
from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Piece, Reasoning, Text
from baton.scheduler.outcome import RequestRefused
from tests.doubles.byte_matcher import takes
from tests.doubles.byte_tokenizer import CHAT_TEMPLATE

LS = {"type": "function", "function": {"name": "ls"}}
CALL = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'


def call(arguments: str) -> str:
    return CALL.replace("{}", arguments)


def parse(parsers: AnswerParsers, text: str, opening: str = "", **fields: Any) -> list[Piece]:
    asked = parse_chat({"messages": [{"role": "user", "content": "Hi"}]} | fields).call
    parser = parsers.make_parser(asked, opening)
    return parser.push_text(text) + parser.finish()


def test_parsers_are_chosen_from_the_template() -> None:
    parsers = AnswerParsers("auto", "auto", CHAT_TEMPLATE)
    assert (parsers.tools_name, parsers.reasoning_name) == ("qwen", "qwen3")
    plain = AnswerParsers("auto", "auto", "{{ messages }}")
    assert (plain.tools_name, plain.reasoning_name) == (None, None)
    off = AnswerParsers("none", "none", CHAT_TEMPLATE)
    assert (off.tools_name, off.reasoning_name) == (None, None)
    told = AnswerParsers("llama3", "deepseek-r1", CHAT_TEMPLATE)
    assert (told.tools_name, told.reasoning_name) == ("llama3", "deepseek-r1")


def test_calls_are_parsed_only_when_tools_are_offered() -> None:
    parsers = AnswerParsers("hermes", "none", "")
    assert parse(parsers, CALL, tools=[LS]) == [CallBegins(0, "ls"), CallArguments(0, "{}")]
    assert parse(parsers, CALL) == [Text(CALL)]
    assert parse(parsers, CALL, tools=[LS], tool_choice="none") == [Text(CALL)]


def test_tools_without_a_call_parser_are_refused() -> None:
    with pytest.raises(RequestRefused, match="--tool-call-parser") as refused:
        parse(AnswerParsers("auto", "auto", "{{ tools }}"), "", tools=[LS])
    assert refused.value.param == "tools" and refused.value.code == "no_tool_call_parser"


def test_reasoning_is_separated_from_text() -> None:
    parsers = AnswerParsers("none", "qwen3", "")
    thought = "<think>\nHm.\n</think>\n\nYes"
    assert parse(parsers, thought) == [Reasoning("Hm."), Text("Yes")]
    assert parse(parsers, thought, separate_reasoning=False) == [Text(thought)]
    assert parse(parsers, "Hm.\n</think>\n\nYes", "<think>\n") == [Reasoning("Hm."), Text("Yes")]
    assert parse(parsers, "Yes", "<think>\n\n</think>\n\n") == [Text("Yes")]
    usually = AnswerParsers("none", "deepseek-r1", "")
    assert parse(usually, "Hm.</think>Yes") == [Reasoning("Hm."), Text("Yes")], "R1 begins inside of a thought"


@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1", "qwen3-thinking"])
@pytest.mark.parametrize("opening", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_form_is_that_of_the_text_which_the_parser_finds(name: str, opening: str) -> None:
    """Where a parser takes all up to an end tag for thought, the grammar asks for that tag."""
    parsers = AnswerParsers("none", name, "")
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "json_object"}}
    grammar = parsers.answer_grammar(parse_chat(body).call, opening, "", {})
    found = []
    for answer in (
        '{"a": 1}',
        'Hm.\n</think>\n\n{"a": 1}',
        '<think>\nHm.\n</think>\n\n{"a": 1}',
        "Hm.\n</think>\n\nYes",
    ):
        if takes(grammar, answer):
            text = [piece.text for piece in parse(parsers, answer, opening) if isinstance(piece, Text)]
            assert "".join(text).strip() == '{"a": 1}', answer
            found.append(answer)
    assert found


def test_call_ids_are_unique_and_well_formed() -> None:
    ids = {AnswerParsers("hermes", "none", "").new_call_id() for _ in range(100)}
    assert len(ids) == 100 and all(re.fullmatch("call_[0-9a-f]{24}", each) for each in ids)
    for parsers in (AnswerParsers("mistral", "none", ""), AnswerParsers("none", "none", "must have length 9!")):
        assert re.fullmatch("[A-Za-z0-9]{9}", parsers.new_call_id())


def test_first_call_only_drops_later_calls() -> None:
    pieces = [
        Text("a"),
        CallBegins(0, "x"),
        CallArguments(0, "{}"),
        CallBegins(1, "y"),
        CallArguments(1, "{}"),
        Text("b"),
    ]
    assert first_call_only(pieces) == [*pieces[:3], pieces[-1]]


@pytest.mark.parametrize(
    ("words", "said", "same"),
    [
        ("Yes", " Yes\n", True),
        ("Yes", "Yes.", False),
        (CALL, '<tool_call>{"arguments":{ },"name":"ls"}</tool_call>', True),
        (CALL, CALL + CALL, False),
        (call('{"a":[1]}'), call('{"a": [1.0]}'), True),
        (call('{"a":[1]}'), call('{"a":[true]}'), False),
        (call('{"a":true}'), call('{"a": true}'), True),
        (call("[" * 900 + "]" * 900), call("[" * 900 + " ]" + "]" * 899), False),
        ("<think>\na\n</think>\n\nb", "<think>a</think>b", True),
        ("a b", "<think>a</think>b", False),
        ("<think>a</think>", "<think>\na\n</think>\n", True),
        ("<think>a</think>", "<think>a", False),
        ("", "<think>", False),
        (CALL, CALL.removesuffix("</tool_call>"), False),
        (CALL, CALL.removesuffix("}\n</tool_call>"), False),
        (CALL + " <", CALL + "\n<", True),
    ],
)
def test_equivalent_answers_are_recognised(words: str, said: str, same: bool) -> None:
    assert AnswerParsers("hermes", "qwen3", "").says_the_same(words, said) is same
