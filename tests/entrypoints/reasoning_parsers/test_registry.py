"""Names, and the choice by chat template."""

from __future__ import annotations

import pytest

from baton.entrypoints.reasoning_parsers.registry import REASONING_PARSERS, choose, reasoning_parser
from baton.entrypoints.tool_parsers.pieces import Reasoning
from tests.doubles.answer_cuts import check

TEMPLATES = {
    "qwen3": "<|im_start|>assistant\n {% if enable_thinking is false %} {{- '<think>\\n\\n</think>\\n\\n' }}",
    "glm45": "[gMASK]<sop> {{- '\\n<think></think>' }}",
    "kimi": "{{ content.split('◁/think▷')[-1] }} {{ '◁think▷' }}",
    "mistral": "{{- '[THINK]' + block.thinking + '[/THINK]' }}",
    "deepseek-r1": "{{'<｜Assistant｜><think>\\n'}}",
    "deepseek-v3": "{{'<｜Assistant｜>'}} {% if not thinking %} {{'</think>'}}",
    "gpt-oss": "{{- '<|start|>assistant<|channel|>analysis<|message|>' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_parser_is_chosen_by_template(name: str) -> None:
    assert choose(TEMPLATES[name]) == name


def test_template_without_reasoning_has_no_parser() -> None:
    assert choose("{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content']}}{% endfor %}") is None


def test_unknown_parser_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no reasoning parser 'gpt'; use one of deepseek-r1, .*qwen3-thinking"):
        reasoning_parser("gpt")
    assert reasoning_parser("qwen3") is REASONING_PARSERS["qwen3"]


@pytest.mark.parametrize(
    ("name", "inside"), [(name, name in ("deepseek-r1", "qwen3-thinking")) for name in REASONING_PARSERS]
)
def test_parsers_start_inside_or_outside_reasoning(name: str, inside: bool) -> None:
    check(REASONING_PARSERS[name], "a", [Reasoning("a") if inside else "a"])
    check(lambda: REASONING_PARSERS[name](begins_inside=True), "a", [Reasoning("a")])
