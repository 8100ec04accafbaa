from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.runtime.text.chat_template import ChatTemplate, ChatTemplateError

EXAMPLES = Path(__file__).parents[3] / "examples"

MESSAGES = [{"role": "user", "content": "1 < 2 é"}]


def render(source: str, messages=MESSAGES, **options) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_special_tokens_messages_and_generation_prompt():
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    source += "{% if add_generation_prompt %}[assistant]{% endif %}"
    assert render(source) == "<s>[user] 1 < 2 é</s>[assistant]"
    assert render(source, add_generation_prompt=False) == "<s>[user] 1 < 2 é</s>"


def test_tojson_escapes_no_html_and_keeps_unicode():
    tools = [{"name": "grep", "description": "find <é>"}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "grep", "description": "find <é>"}]'
    assert render("{{ tools[0] | tojson(indent=2) }}", tools=tools).count("\n") == 3


def test_template_tools_are_none_without_tools():
    assert render("{{ 'yes' if tools is none else 'no' }}") == "yes"


def test_variables_reach_the_template():
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"


def test_template_variables_may_have_any_name():
    """They come from the caller; Jinja has a self of its own."""
    variables: dict[str, Any] = {"self": 1, "args": 2, "context": 3}
    assert ChatTemplate("{{ args }}{{ context }}", {}).render(MESSAGES, **variables) == "23"


def test_template_blocks_are_trimmed():
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


def test_generation_marks_and_loop_controls():
    source = "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source) == "user"


def test_strftime_now():
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_a_refusal_of_the_template_is_reported():
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_unsafe_templates_are_blocked_by_sandbox(source):
    with pytest.raises(ChatTemplateError):
        render(source)


def test_missing_message_fields_are_reported():
    with pytest.raises(ChatTemplateError, match=r"TypeError.*fields"):
        render("{{ messages[0].content + 'x' + messages[0].number }}", [{"content": "a", "number": 1}])


def test_broken_templates_are_refused():
    with pytest.raises(ChatTemplateError, match="not valid Jinja"):
        render("{% for %}")
