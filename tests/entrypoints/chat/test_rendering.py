"""What is asked of a chat template, and what is said where it cannot."""

from __future__ import annotations

import asyncio
import threading

import pytest

from baton.entrypoints.chat.messages import Conversation
from baton.entrypoints.chat.rendering import Renderer, beside_others, size_of
from baton.entrypoints.chat.template_choice import ChatTemplates
from baton.entrypoints.http_statuses import status_of
from baton.scheduler.outcome import RequestRefused
from tests.doubles.chats import conversation, make_renderer

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def test_generation_prompt_and_forced_prefix_are_rendered() -> None:
    assert make_renderer(PLAIN).render(conversation("Hi", forced="{")) == "<user>Hi</><a>{"


@pytest.mark.parametrize("long", [False, True])
def test_long_conversations_are_processed_off_the_event_loop(long: bool) -> None:
    size = size_of(conversation("x" * (30_000 if long else 1_000)))
    at_work = asyncio.run(beside_others(size, threading.current_thread))
    assert (at_work is not threading.current_thread()) is long


def test_rendering_without_generation_prompt() -> None:
    renderer = make_renderer(PLAIN)
    assert renderer.render(conversation("Hi", "Ho", add_generation_prompt=False)) == "<user>Hi</><assistant>Ho</>"
    assert renderer.render(conversation("Hi", "Ho", "Hm", forced="no").first(2)) == "<user>Hi</><assistant>Ho</>"


@pytest.mark.parametrize("content", ["Ho", "", " two  spaces ", "<user>Hi</>"])
def test_final_message_is_left_open_when_continued(content: str) -> None:
    asked = conversation("Hi", content, goes_on=True, add_generation_prompt=False)
    assert make_renderer(PLAIN).render(asked) == f"<user>Hi</><assistant>{content}"


def test_text_after_message_content() -> None:
    assert make_renderer(PLAIN).after_content(conversation("Hi", "Ho").first(2)) == "</>"
    assert make_renderer("{% for m in messages %}{{ m.content | trim }}<|end|>\n{% endfor %}").after_content(
        conversation("Hi", "<|end|>").first(2)
    ) == "<|end|>\n"  # fmt: skip


def test_variables_tools_and_documents_reach_the_template() -> None:
    renderer = make_renderer("{{ tools[0].function.name }} {{ (documents or [{}])[0].y }} {{ enable_thinking }}")
    asked = Conversation(
        messages=[], tools=[{"function": {"name": 1}}], documents=[{"y": 2}], variables={"enable_thinking": False}
    )
    assert renderer.render(asked) == "1 2 False" and renderer.knows_tools
    assert renderer.render(asked.first(0)) == "1 2 False"


def test_reserved_variable_names_do_not_break_rendering() -> None:
    renderer = make_renderer("{{ namespace }} {{ messages | length }}")
    assert renderer.render(Conversation(messages=[], variables={"self": 1, "namespace": 2, "messages": "x"})) == "2 0"


def test_developer_role_falls_back_to_system() -> None:
    asked = Conversation(messages=[{"role": "developer", "content": "Be"}, {"role": "user", "content": "Hi"}])
    assert make_renderer(PLAIN).render(asked) == "<system>Be</><user>Hi</><a>"
    knows = make_renderer(PLAIN + "{# developer #}")
    assert knows.render(asked) == "<developer>Be</><user>Hi</><a>"


@pytest.mark.parametrize(
    ("renderer", "code", "says"),
    [
        (Renderer(ChatTemplates(None, None)), "no_chat_template", "--chat-template"),
        (make_renderer("{{ raise_exception('roles must alternate') }}"), "chat_template_error", "roles must alternate"),
        (make_renderer("{{ messages[3].content }}"), "chat_template_error", "messages"),
        (make_renderer("{{ messages[0].nothing.more }}"), "chat_template_error", "refuses"),
        (make_renderer("constant"), "chat_template_error", "continue_final_message"),
    ],
)
def test_template_failures_are_refused_with_a_code(renderer: Renderer, code: str, says: str) -> None:
    asked = conversation("Hi", "Ho", goes_on=code == "chat_template_error" and says == "continue_final_message")
    with pytest.raises(RequestRefused, match=says) as refused:
        renderer.render(asked)
    assert (refused.value.code, refused.value.param, status_of(refused.value)) == (code, "messages", 400)


def test_deeply_nested_conversation_is_refused() -> None:
    """A body's decoder goes as deep as the encoder, which may stand on a taller stack."""
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestRefused, match="nested too deeply"):
        size_of(Conversation(messages=[], tools=[{"x": deep}]))


STRICT = """{%- for m in messages %}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("System must be first.") }}{% endif %}
{%- if not loop.first and m.role == "user" and messages[loop.index0 - 1].role == "user" %}
{{- raise_exception("Roles must alternate.") }}{% endif %}<{{ m.role }}>{{ m.content }}</>
{%- endfor %}"""


def said(*pairs: tuple[str, str]) -> Conversation:
    return Conversation(messages=[{"role": role, "content": content} for role, content in pairs])


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ([("developer", "A"), ("system", "B"), ("user", "C")], "<system>A\n\nB</><user>C</>"),
        ([("user", "A"), ("system", "B")], "<user>A\n\nB</>"),
        ([("system", "S"), ("user", "A"), ("system", "B"), ("user", "C")], "<system>S</><user>A\n\nB\n\nC</>"),
        ([("user", "A"), ("assistant", "B"), ("system", "C")], "<user>A</><assistant>B</><user>C</>"),
        ([("user", "A"), ("user", "B"), ("assistant", "C")], "<user>A\n\nB</><assistant>C</>"),
    ],
)
def test_strict_role_template_renders_agent_messages(given: list, rendered: str) -> None:
    assert make_renderer(STRICT).render(said(*given)) == rendered
    roles = [("system" if role == "developer" else role, content) for role, content in given]
    as_given = "".join(f"<{role}>{content}</>" for role, content in roles) + "<a>"
    assert make_renderer(PLAIN).render(said(*given)) == as_given


def test_reordered_roles_keep_the_rendered_prefix() -> None:
    turns = [("system", "S"), ("user", "A"), ("system", "B"), ("assistant", "C"), ("user", "D"), ("system", "E")]
    renderer = make_renderer(STRICT)
    assert renderer.render(said(*turns)).startswith(renderer.render(said(*turns[:3])))


def test_template_exception_message_is_passed_on() -> None:
    refusing = make_renderer("{{ raise_exception('Never ' ~ messages | length) }}")
    with pytest.raises(RequestRefused, match="Never 2"):
        refusing.render(said(("system", "A"), ("system", "B")))
