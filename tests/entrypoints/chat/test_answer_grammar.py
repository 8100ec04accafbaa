"""The grammar of a chat's answer, for each form of calls and thoughts: which answers it takes whole, and which not.

A byte tokenizer whose special tokens are those of the models reads the answers; so each test says exactly where an
answer may end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.entrypoints.chat.answer_grammar import AnswerGrammar
from baton.entrypoints.chat.tools import Choice
from baton.entrypoints.fields.grammars import take_grammar
from baton.entrypoints.reasoning_parsers.output_parser import OutputParser
from baton.entrypoints.reasoning_parsers.registry import reasoning_parser
from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Text, ToolSpec, forced_prefix, joined
from baton.entrypoints.tool_parsers.registry import TOOL_PARSERS, tool_parser
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.sampling_params import Grammar
from tests.doubles.byte_matcher import IDS, is_begun, takes

READ = ToolSpec(
    "read_file",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "integer", "minimum": 1}},
        "required": ["path"],
        "additionalProperties": False,
    },
    strict=True,
)
LIST = ToolSpec("list_files", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True)
TOOLS = (READ, LIST)
FORM = take_grammar({"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                                     "additionalProperties": False}}, "")  # fmt: skip

SET = take_grammar({"json_schema": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}, "")

CALLS: dict[str, tuple[str, str, str]] = {
    "hermes": (
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.txt"}}\n</tool_call>',
        '<tool_call>\n{"name": "read_file", "arguments": {"path": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "list_files", "arguments": {}}\n</tool_call>',
    ),
    "llama3": (
        '{"name": "read_file", "parameters": {"path": "a.txt"}}',
        '{"name": "read_file", "parameters": {"lines": 1}}',
        '{"name": "read_file", "parameters": {"path": "a"}}; {"name": "list_files", "parameters": {}}',
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "read_file", "arguments": {"path": "a.txt"}}]',
        '[TOOL_CALLS] [{"name": "write_file", "arguments": {"path": "a.txt"}}]',
        '[TOOL_CALLS] [{"name": "read_file", "arguments": {"path": "a"}}, {"name": "list_files", "arguments": {}}]',
    ),
    "mistral-args": (
        '[TOOL_CALLS]read_file[ARGS]{"path": "a.txt"}',
        '[TOOL_CALLS]read_file[ARGS]{"path": "a.txt", "lines": 0}',
        '[TOOL_CALLS]read_file[ARGS]{"path": "a"}[TOOL_CALLS]list_files[ARGS]{}',
    ),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read_file\n```json\n"
        '{"path": "a.txt"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read_file\n```json\n"
        '{"file": "a.txt"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read_file\n```json\n"
        '{"path": "a"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>list_files\n```json\n{}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read_file<｜tool▁sep｜>"
        '{"path": "a.txt"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read_file<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read_file<｜tool▁sep｜>{"path": "a"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>list_files<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "gpt-oss": (
        '<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>{"path": "a.txt"}<|call|>',
        '<|channel|>commentary to=functions.read_file <|constrain|>json<|message|>{"path": null}<|call|>',
        "",
    ),
    "pythonic": (
        '[read_file(path="a.txt")]',
        "[read_file(path=1)]",
        '[read_file(path="a", lines=3), list_files()]',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=read_file>\n<parameter=path>\na.txt\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=read_file>\n<parameter=path>\na\n</parameter>\n<parameter=lines>\nx\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=read_file>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=list_files>\n</function>\n</tool_call>",
    ),
}  # fmt: skip
"""Parser -> a call that is right, one that is wrong, and two calls (none where an answer has one)."""
CALLS["qwen"] = CALLS["qwen25"] = CALLS["hermes"]


def built(
    tools: str | None,
    thoughts: str | None,
    form: Grammar | None = None,
    specs: tuple[ToolSpec, ...] = TOOLS,
    choice: Choice = Choice(),  # noqa: B008
    forced: str = "",
    inside: bool = False,
) -> Grammar | None:
    grammar = AnswerGrammar(
        tool_parser(tools) if tools else None, reasoning_parser(thoughts) if thoughts else None, IDS
    )
    return grammar.build(form, specs, choice, forced, inside=inside)


def calls_in(parser: str, answer: str) -> list[tuple[str, Any]]:
    """What the parser reads in an answer."""
    reader = OutputParser(None, tool_parser(parser)(TOOLS))
    pieces = joined(reader.push_text(answer) + reader.finish())
    names = [piece.name for piece in pieces if isinstance(piece, CallBegins)]
    given = [json.loads(piece.delta) for piece in pieces if isinstance(piece, CallArguments)]
    assert not any(isinstance(piece, Text) and piece.text.strip() for piece in pieces), pieces
    return list(zip(names, given, strict=True))


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_every_parser_reads_what_its_grammar_takes(parser: str) -> None:
    right, wrong, two = CALLS[parser]
    thoughts = "gpt-oss" if parser == "gpt-oss" else None
    grammar = built(parser, thoughts)
    assert takes(grammar, right) and not takes(grammar, wrong)
    assert calls_in(parser, right) == [("read_file", {"path": "a.txt"})]
    if two:
        assert takes(grammar, two) and not takes(built(parser, thoughts, choice=Choice(parallel=False)), two)
        assert [name for name, _ in calls_in(parser, two)] == ["read_file", "list_files"]


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_answer_is_a_call_or_fulfils_the_form(parser: str) -> None:
    right, wrong, two = CALLS[parser]
    thoughts = "gpt-oss" if parser == "gpt-oss" else None
    start = "<|channel|>final<|message|>" if thoughts else ""
    grammar = built(parser, thoughts, FORM)
    assert takes(grammar, right) and takes(grammar, start + '{"a": 1}')
    assert not takes(grammar, wrong) and not takes(grammar, start + '{"a": "x"}') and not is_begun(grammar, "Hello")
    assert not two or takes(grammar, two)
    free = built(parser, thoughts, FORM, choice=Choice("none"))
    assert not is_begun(free, right) and takes(free, start + '{"a": 1}')


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_forced_call_is_completed(parser: str) -> None:
    right, wrong, two = CALLS[parser]
    reader = tool_parser(parser)(TOOLS)
    for name in (None, "read_file"):
        forced = forced_prefix(reader, name)
        choice = Choice("any") if name is None else Choice("named", name)
        grammar = built(parser, None, choice=choice, forced=forced)
        assert right.startswith(forced) and takes(grammar, right[len(forced) :])
        assert not takes(grammar, wrong.removeprefix(forced))
        if two:
            assert takes(grammar, two[len(forced) :]) is (name is None)


@pytest.mark.parametrize("parser", ["hermes", "mistral", "mistral-args", "deepseekv3", "qwen3_coder"])
def test_strict_calls_may_stand_in_text(parser: str) -> None:
    right, wrong, _ = CALLS[parser]
    grammar = built(parser, None)
    assert takes(grammar, "Hello") and takes(grammar, f"I will look.\n{right}")
    assert not takes(grammar, f"I will look.\n{wrong}") and takes(grammar, "")


@pytest.mark.parametrize("parser", ["llama3", "pythonic"])
def test_answer_that_begins_like_a_call_is_one(parser: str) -> None:
    right, wrong, _ = CALLS[parser]
    grammar = built(parser, None)
    assert takes(grammar, right) and takes(grammar, "Hello {x} [y]") and not is_begun(grammar, wrong)


def test_answer_is_free_without_strict_tools_or_a_form() -> None:
    loose = (ToolSpec("read_file", READ.parameters), ToolSpec("list_files", {}))
    assert built("hermes", "qwen3", specs=loose) is None and built(None, None, specs=()) is None
    assert built("hermes", None, choice=Choice("none")) is None


def test_tool_without_strict_is_held_to_what_can_be_enforced() -> None:
    odd = {"type": "object", "properties": {"path": {"type": "string", "not": {"const": "x"}}}, "required": ["path"]}
    grammar = built("hermes", None, specs=(ToolSpec("f", odd),), choice=Choice("named", "f"), forced="x")
    assert takes(grammar, '{"path": "x"}}\n</tool_call>') and not takes(grammar, '{"path": 1}}\n</tool_call>')
    broken = {"type": "object", "properties": {"path": {"$ref": "http://elsewhere.org"}}}
    grammar = built("hermes", None, specs=(ToolSpec("f", broken),), choice=Choice("named", "f"), forced="x")
    assert takes(grammar, '{"path": 1}}\n</tool_call>') and not takes(grammar, "[]}\n</tool_call>")
    deep: dict = {}
    for _ in range(200):
        deep = {"type": "object", "properties": {"x": deep}}
    grammar = built("hermes", None, specs=(ToolSpec("f", deep),), choice=Choice("named", "f"), forced="x")
    assert takes(grammar, '{"x": 1}}\n</tool_call>')
    grammar = built("hermes", None, specs=(ToolSpec("f", {}),), choice=Choice("named", "f"), forced="x")
    assert takes(grammar, " {}}\n</tool_call>") and not takes(grammar, "3}\n</tool_call>")


# -- thoughts ----------------------------------------------------------------------------------------------------------

THOUGHTS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek-r1": ("<think>", "</think>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "mistral": ("[THINK]", "[/THINK]"),
}


@pytest.mark.parametrize("parser", THOUGHTS)
def test_form_begins_after_the_thought(parser: str) -> None:
    start, end = THOUGHTS[parser]
    thought = 'Is it {"a": 2} or {"a": '
    grammar = built(None, parser, FORM, specs=())
    assert takes(grammar, '{"a": 1}') and takes(grammar, f'{start}{thought}{end}{{"a": 1}}')
    assert takes(grammar, f'{start}\n{thought}\n{end}\n\n{{"a": 1}}')
    assert not takes(grammar, thought) and not takes(grammar, f"{start}{thought}{end}Hello")
    opened = built(None, parser, FORM, specs=(), inside=True)
    assert takes(opened, f'{thought}{end}\n{{"a": 1}}') and not takes(opened, '{"a": 1}')
    reader = reasoning_parser(parser)(begins_inside=True)
    assert joined(reader.push_text(f'{thought}{end}\n\n{{"a": 1}}') + reader.finish())[-1] == Text('{"a": 1}')


@pytest.mark.parametrize("parser", THOUGHTS)
def test_values_are_compared_behind_the_thought(parser: str) -> None:
    start, end = THOUGHTS[parser]
    grammar, thought = built(None, parser, SET, specs=()), "[1, 1] or [1,1"
    for opening in ("", f"{start}{thought}{end}", f"{start}{thought}{end}\n\n"):
        assert takes(grammar, f"{opening}[1, 2]") and not takes(grammar, f"{opening}[1, 2, 1]")
    opened = built(None, parser, SET, specs=(), inside=True)
    assert takes(opened, f"{thought}{end}[1, 2]") and not takes(opened, f"{thought}{end}[1, 1]")


def test_values_are_compared_in_the_final_channel() -> None:
    final, thought = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>[1, 1]<|end|><|start|>assistant"
    grammar = built("gpt-oss", "gpt-oss", SET)
    for opening in ("", thought):
        assert takes(grammar, f"{opening}{final}[1, 2]") and not takes(grammar, f"{opening}{final}[1, 1]")
    assert takes(grammar, thought + CALLS["gpt-oss"][0])


def test_call_in_a_thought_is_none() -> None:
    right, wrong, _ = CALLS["hermes"]
    grammar = built("hermes", "qwen3", FORM, inside=True)
    assert takes(grammar, f"{wrong}</think>\n\n{right}") and not takes(grammar, f"{right}</think>")
    text = built("hermes", "qwen3", inside=True)
    assert takes(text, f"{wrong}</think>Hello {right}") and not takes(text, f"</think>Hello {wrong}")


def test_harmony_thinks_on_a_channel_of_its_own() -> None:
    right, wrong, _ = CALLS["gpt-oss"]
    thought = "<|channel|>analysis<|message|>Hm, {.<|end|><|start|>assistant"
    grammar = built("gpt-oss", "gpt-oss", FORM)
    assert takes(grammar, thought + right) and takes(grammar, f'{thought}<|channel|>final<|message|>{{"a": 1}}')
    assert not takes(grammar, thought + wrong) and not takes(grammar, f"{thought}<|channel|>final<|message|>Hello")
    text = built("gpt-oss", "gpt-oss")
    assert takes(text, f"{thought}<|channel|>final<|message|>Hello") and takes(text, thought + right)
    assert not takes(text, thought + wrong)


# -- values that models write in their own way -------------------------------------------------------------------------


def tool(strict: bool = True, **properties: Any) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": [next(iter(properties))]}
    return ToolSpec("f", schema, strict)


@pytest.mark.parametrize(
    ("spec", "right", "wrong"),
    [
        (tool(a={"type": "boolean"}), ["a=True", "a=False"], ["a=true", "a=1", ""]),
        (tool(a={"type": "string"}, b={"type": "boolean"}), ['a="x"', 'a="x", b=True'], ['a="x",b=1', "b=True"]),
        (tool(a={"type": "array", "items": {"type": "integer"}}), ["a=[1, 2]", "a=[]"], ['a=["x"]']),
        (tool(a={"enum": ["x", "y"]}), ['a="x"'], ['a="z"']),
        (tool(False, a={"type": "object"}), ['a={"x": True}'], [""]),
    ],
)
def test_python_calls(spec: ToolSpec, right: list[str], wrong: list[str]) -> None:
    grammar = built("pythonic", None, specs=(spec,), choice=Choice("named", "f"), forced="[f(")
    assert all(takes(grammar, f"{each})]") for each in right), right
    assert not any(takes(grammar, f"{each})]") for each in wrong), wrong


@pytest.mark.parametrize(
    ("spec", "right", "wrong"),
    [
        (tool(a={"type": "string"}), ["two\nlines, <b>", ""], ["x\n</parameter>\ny"]),
        (tool(a={"type": "string", "maxLength": 2}), ["ab", "é"], ["abc"]),
        (tool(a={"enum": ["x", "y z"]}), ["x", "y z"], ["z", '"x"']),
        (tool(a={"type": "integer"}), ["12"], ["x", ""]),
        (tool(a={"type": "object", "properties": {"b": {"type": "boolean"}}}), ['{"b": true}'], ['{"b": 1}']),
    ],
)
def test_calls_between_tags(spec: ToolSpec, right: list[str], wrong: list[str]) -> None:
    grammar = built("qwen3_coder", None, specs=(spec,), choice=Choice("named", "f"), forced="x")

    def call(value: str) -> str:
        return f"<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"

    assert all(takes(grammar, call(each)) for each in right), right
    assert not any(takes(grammar, call(each)) for each in wrong), wrong


@pytest.mark.parametrize(
    ("parser", "schema"),
    [
        ("pythonic", {"type": "object"}),
        ("pythonic", {"type": ["string", "null"]}),
        ("qwen3_coder", {"type": "string", "pattern": "^a"}),
        ("qwen3_coder", {}),
    ],
)
def test_strict_that_cannot_be_kept_is_refused_by_name(parser: str, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused, match="strict cannot be kept for 'a' of 'f'") as refused:
        built(parser, None, specs=(tool(a=schema),))
    assert (refused.value.code, refused.value.param) == ("invalid_grammar", "tools")
    assert built(parser, None, specs=(tool(False, a=schema),), choice=Choice("any"), forced="x") is not None


@pytest.mark.parametrize("parser", ["hermes", "pythonic", "qwen3_coder"])
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"a": {"type": "integer", "enum": [1733333333333333333]}}}, "too many digits"),
        ({"properties": {"a": {"type": "array", "items": {"type": "string", "pattern": r"\Ab"}}}}, "no escape"),
        ({"properties": {"a": {"type": "integer"}}, "required": 5}, "a list of names"),
        ({"properties": {"a": {"type": "integer", "maxLength": -1}}}, "a whole number from 0"),
    ],
    ids=str,
)
def test_schemas_of_arguments_are_read_as_others(parser: str, parameters: dict[str, Any], words: str) -> None:
    parameters = {"type": "object", "additionalProperties": False, **parameters}
    with pytest.raises(RequestRefused, match=words) as refused:
        built(parser, None, specs=(ToolSpec("f", parameters, strict=True),))
    assert refused.value.code == "invalid_grammar"
    loose = (ToolSpec("f", {**parameters, "properties": {"b": {"const": 10**400}}}),)
    assert built(parser, None, specs=loose, choice=Choice("any"), forced="x") is not None
