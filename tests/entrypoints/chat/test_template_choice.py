"""Which chat template is used for chats with tools, and whether a template has a place for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.entrypoints.chat.template_choice import choose_templates, has_place_for_tools
from baton.entrypoints.tool_parsers.registry import choose
from baton.runtime.text.chat_template import ChatTemplate
from baton.runtime.text.tokenizer import Tokenizer
from tests.doubles.byte_tokenizer import CHAT_TEMPLATE, write_byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
INST = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"

MARKS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]


def tokenizer_of(folder: Path, template: str | list[dict], marks: list[str] = MARKS) -> Tokenizer:
    write_byte_tokenizer(folder)
    config = {"bos_token": "<s>", "eos_token": "<eos>", "chat_template": template, "additional_special_tokens": marks}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("source", "has_place"),
    [
        (CHAT_TEMPLATE, True),
        (CHATML, False),
        ("{# tools are not supported #}" + CHATML, False),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + CHATML, False),
        ("{% if tools %}You may use tools.{% endif %}" + CHATML, False),
        ("{% set tools = [] %}{% for t in tools %}{{ t | tojson }}{% endfor %}" + CHATML, False),
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHATML, True),
        # Into the system's message only
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ tools | tojson }}{% endif %}{% endfor %}" + CHATML,
            True,
        ),
        # It takes no system's message
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ tools | tojson }}", True),
        ("{{ raise_exception('never') }}", False),
    ],
)
def test_tool_support_of_a_template_is_probed(source: str, has_place: bool) -> None:
    assert has_place_for_tools(ChatTemplate(source, {})) is has_place


def test_template_with_tool_support_serves_both_chat_kinds(tmp_path: Path) -> None:
    chosen = choose_templates(tokenizer_of(tmp_path, CHAT_TEMPLATE))
    assert chosen.with_tools is chosen.plain is not None and not chosen.bundled


def test_named_tool_use_template_is_chosen(tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": CHAT_TEMPLATE}]
    tokenizer = tokenizer_of(tmp_path, named)
    chosen = choose_templates(tokenizer)
    assert chosen.plain is not None and chosen.plain.source == CHATML and not chosen.bundled
    assert chosen.with_tools is not None and chosen.with_tools.source == CHAT_TEMPLATE
    assert choose_templates(tokenizer, ChatTemplate(CHAT_TEMPLATE, {})).plain is not chosen.plain, (
        "the operator's first"
    )


def test_named_tool_use_template_without_default(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": CHATML}, {"name": "tool_use", "template": CHAT_TEMPLATE}]
    chosen = choose_templates(tokenizer_of(tmp_path, named))
    assert chosen.plain is None and chosen.with_tools is not None


def test_without_chat_template_there_is_none_for_tools(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    chosen = choose_templates(Tokenizer.load(tmp_path))
    assert (chosen.plain, chosen.with_tools, chosen.bundled) == (None, None, "")


@pytest.mark.parametrize(
    ("template", "marks", "bundled"),
    [
        (CHATML, MARKS, "chatml_tools.jinja"),
        (LLAMA, MARKS, "llama3_tools.jinja"),
        (CHATML, [], ""),  # the marks are no tokens of this model
        (LLAMA, ["<|start_header_id|>"], ""),
        (INST, MARKS, ""),
    ],
)
def test_bundled_template_matches_the_model_marks(
    tmp_path: Path, template: str, marks: list[str], bundled: str
) -> None:
    chosen = choose_templates(tokenizer_of(tmp_path, template, marks))
    assert chosen.bundled == bundled and (chosen.with_tools is None) == (bundled == "")
    assert chosen.plain is not None and chosen.plain.source == template


@pytest.mark.parametrize("template", [CHATML, LLAMA, "{{ bos_token }}" + CHATML])
def test_bundled_template_renders_like_the_model_template(tmp_path: Path, template: str) -> None:
    """Without tools and calls it is the same text, bos and all; with them, a chat begins as it did when it goes on."""
    chosen = choose_templates(tokenizer_of(tmp_path, template))
    plain, with_tools = chosen.plain, chosen.with_tools
    assert plain is not None and with_tools is not None and choose(with_tools.source) == "hermes"
    messages: list[dict] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "List it."}]
    for asks in (True, False):
        for chat in (messages, [*messages, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]):
            expected = plain.render(chat, add_generation_prompt=asks)
            assert with_tools.render(chat, add_generation_prompt=asks) == expected
    asked = with_tools.render(messages, tools=TOOLS)
    assert asked.endswith(plain.render(messages).partition("Be brief.")[2].lstrip()) and '"name": "ls"' in asked
    answer = '<tool_call>\n{"name": "ls", "arguments": {"path": "é"}}\n</tool_call>'
    call = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": {"path": "é"}}}
    messages += [{"role": "assistant", "content": "", "tool_calls": [call, call]}]
    messages += [{"role": "tool", "tool_call_id": "1", "content": "a b"}]
    went_on = with_tools.render(messages, tools=TOOLS)
    assert went_on.startswith(f"{asked}{answer}\n{answer}<|") and "<tool_response>\na b\n</tool_response>" in went_on
