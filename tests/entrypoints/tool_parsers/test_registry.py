"""Names, and the choice by chat template. The excerpts are what makes each template what it is, in our own words."""

from __future__ import annotations

import pytest

from baton.entrypoints.tool_parsers.pieces import Text
from baton.entrypoints.tool_parsers.registry import TOOL_PARSERS, choose, tool_parser
from tests.doubles.answer_cuts import TOOLS, parse

CALLS_AS_JSON = """{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}"""

TEMPLATES = {
    "qwen": "<|im_start|> {% if enable_thinking is false %} " + CALLS_AS_JSON,
    "hermes": "<|im_start|>system\n Call functions: " + CALLS_AS_JSON.replace('"', '\\"'),
    "qwen3_coder": "{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}",
    "llama3": "<|start_header_id|> Environment: ipython {% if builtin_tools %} {{- '<|python_tag|>' }}",
    "mistral": "{{- '[INST]' }} {{- '[TOOL_CALLS] [' }}",
    "mistral-args": "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "deepseekv3": "{{'<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json\\n' }}",
    "deepseekv31": "{{'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments }}",
    "pythonic": "Answer with [func_name1(params_name1=value)] {{- '<|header_start|>ipython' }}",
    "gpt-oss": "{{- '<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>' }}",
}
WITHOUT_CALLS = [
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}{% endfor %}",
    "{{- '<tool_call>' + name + '\\n<arg_key>' + key + '</arg_key>' }} {{ \"name\" }}",
    "{{- '<tool_call>' + name + '<tool_sep>' }} {{ \"name\" }}",
    "{{- '<tool_call>' }}",
    "",
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_parser_is_chosen_by_template(name: str) -> None:
    assert choose(TEMPLATES[name]) == name


@pytest.mark.parametrize("template", WITHOUT_CALLS)
def test_template_without_known_calls_has_no_parser(template: str) -> None:
    assert choose(template) is None


def test_every_call_format_is_chosen_by_some_template() -> None:
    assert set(TEMPLATES) | {"qwen25"} == set(TOOL_PARSERS)


def test_unknown_parser_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no tool call parser 'qwen4'; use one of deepseekv3, .*qwen3_coder"):
        tool_parser("qwen4")
    assert tool_parser("qwen25") is TOOL_PARSERS["qwen"]


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_plain_text_passes_through_immediately(name: str) -> None:
    parser = TOOL_PARSERS[name](TOOLS)
    text = "It is 3 °C in Tromsø.\n\n- a\n- b = [1]\n\n1 < 2 {}"
    assert all(parser.push_text(character) for character in text if character not in "\n<[")
    assert parse(TOOL_PARSERS[name](TOOLS), text) == [Text(text)]
