"""Piece by piece gives what the template gives for the whole conversation, or an error that says why it cannot."""

from __future__ import annotations

import pytest

from baton.entrypoints.lang.role_texts import RoleTexts
from baton.runtime.text.chat_template import ChatTemplate, ChatTemplateError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<s>system: be good\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role + ': ' + m.content.strip() + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)
DROPS_THOUGHTS = (  # the last assistant message gets an empty thought, earlier ones lose theirs
    "{% for m in messages %}{{ '<' + m.role + '>' }}"
    "{% if m.role == 'assistant' %}{% if loop.last %}{{ '<think></think>' }}{% endif %}{{ m.content.split('</think>')[-1] }}"  # noqa: E501
    "{% else %}{{ m.content }}{% endif %}{{ '</' + m.role + '>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TALK = [("user", "hello"), ("assistant", "hi"), ("user", "how?"), ("assistant", "so")]


def write(template: ChatTemplate, talk: list[tuple[str, str]]) -> str:
    roles, text = RoleTexts(template), ""
    for role, content in talk:
        text += roles.begin_message(role) + content
        assert roles.is_open
        text += roles.end_message()
        assert not roles.is_open
    return text


@pytest.mark.parametrize("source", [CHATML, DEFAULT_SYSTEM], ids=["chatml", "default system"])
def test_incremental_role_texts_equal_the_whole_rendering(source: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    for talk in (TALK, TALK[:1], TALK[:3], [("system", "be brief"), *TALK]):
        messages = [{"role": role, "content": content} for role, content in talk]
        assert write(template, talk) == template.render(messages, add_generation_prompt=False)


def test_assistant_message_begins_at_the_generation_prompt() -> None:
    template = ChatTemplate(DROPS_THOUGHTS, {})
    talk = [("user", "a"), ("assistant", "<think>t</think>b"), ("user", "c"), ("assistant", "d")]
    text = "<user>a</user><assistant><think>t</think>b</assistant><user>c</user><assistant>d</assistant>"
    assert write(template, talk) == text, "what was said stays as it was said"
    # Llama 2 writes a space before an answer, but leaves it to the model to generate.
    llama2 = ChatTemplate(LLAMA2, {"bos_token": "<s>"})
    assert write(llama2, [("user", "a"), ("assistant", " b")]) == "<s>[INST] a [/INST] b </s>"


def test_copied_role_texts_are_independent() -> None:
    roles = RoleTexts(ChatTemplate(CHATML, {}))
    roles.begin_message("user")
    other = roles.copy_roles()
    assert roles.end_message() == other.end_message() == "<|im_end|>\n"
    other.begin_message("assistant")
    assert other.is_open and not roles.is_open
    assert roles.begin_message("user") == "<|im_start|>user\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
            "content of a message 2 times",
        ),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "0 times"),
        (
            "{% for m in messages %}{{ m.content }}{% if loop.last %}END{% endif %}{% endfor %}",
            "cannot be written piece",
        ),
        ("{{ raise_exception('no ' ~ messages[0].role) }}", "no user"),
    ],
)
def test_unsplittable_templates_are_refused(source: str, message: str) -> None:
    roles = RoleTexts(ChatTemplate(source, {}))
    with pytest.raises(ChatTemplateError, match=message):
        roles.begin_message("user")
        roles.end_message()
        roles.begin_message("user")
