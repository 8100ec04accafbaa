"""The beginning of the next prompt, as the template will write it: what it is, for whom, and that it is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.entrypoints.chat.next_turn import MIN_TOKENS, ReturnHabits, returned_answer
from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Reasoning, Text
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.request_spec import Predecessor
from tests.doubles.byte_tokenizer import EOS_ID, write_byte_tokenizer
from tests.entrypoints.chat.test_chats import BILLING, HI, LS, STOP, Scene

FORGETFUL = """{%- for message in messages %}[{{ message.role }}]
{%- if message.reasoning_content and loop.index0 > ns_last_user %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}
{{- message.content | trim }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<eos>
{% endfor %}
{%- if add_generation_prompt %}[assistant]{{ "<think>\\n" if enable_thinking }}{% endif %}"""
LAST_USER = """{%- set found = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == "user" %}{% set found.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}[tools]{{ tools | tojson }}{% endif %}"""
"""As Qwen3 does: thoughts stay in the chain of tool calls that follows the last user's message."""
THOUGHTS = "<think>\nLet me think about that for a while.\n</think>\n\n"
TEMPLATE = LAST_USER + FORGETFUL.replace("ns_last_user", "found.last")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("model")))


@pytest.fixture
def scene(tokenizer: Tokenizer, tmp_path: Path) -> Scene:
    return make_scene(tokenizer, tmp_path)


def make_scene(tokenizer: Tokenizer, folder: Path, **config: Any) -> Scene:
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    return Scene(tokenizer, chat_template=str(template), **config)


def prepared_text(scene: Scene) -> str:
    _, _, ids = scene.manager.prepared[-1]
    return scene.manager.tokenizer.decode(ids, False)


def assistant(words: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": words, **more}


@pytest.mark.parametrize("stream", [False, True])
def test_dropped_thoughts_are_left_out(scene: Scene, stream: bool) -> None:
    scene.chat(HI, says=f"{THOUGHTS}Ho, née 漢字 🙂", rid="one", stream=stream)
    assert scene.manager.prepared[0][:2] == ("one", 0)
    assert prepared_text(scene) == "[user]Hi<eos>\n[assistant]Ho, née 漢字 🙂"
    scene.chat(HI, assistant("Ho, née 漢字 🙂"), HI, rid="two")
    assert scene.sent.spec.predecessor == Predecessor("one")
    assert scene.text == "[user]Hi<eos>\n[assistant]Ho, née 漢字 🙂<eos>\n[user]Hi<eos>\n[assistant]"
    assert scene.sent.input_ids == scene.manager.tokenizer.encode(scene.text, False)


def test_next_prompt_has_the_same_tokens_without_preparation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    scenes = [make_scene(tokenizer, tmp_path, prepare_next_turn=how) for how in ("auto", "off")]
    messages: list[dict[str, Any]] = []
    answers = [f"Answer {number}" + number * " and more words" for number in range(5)]
    for number in range(5):
        messages.append({"role": "user", "content": f"Question {number} <b>é</b>"})
        for each in scenes:
            each.chat(*messages, says=f"{THOUGHTS}{answers[number]}\n", rid=f"r{number}")
        ours, theirs = (each.sent for each in scenes)
        assert ours.input_ids == theirs.input_ids
        assert (ours.spec.predecessor is not None) == (number > 0) and ours.spec.job_id == "chat-r0"
        messages.append(assistant(answers[number]))
    assert len(scenes[0].manager.prepared) == 4, "a short answer is recorded, and not worth a preparation"
    assert not scenes[1].manager.prepared


def test_answer_that_the_next_chat_continues_is_not_prepared(scene: Scene) -> None:
    scene.chat(HI, says="A long enough answer without any thoughts", rid="one")
    scene.chat(HI, assistant("Ho"), HI, says='<tool_call>\n{"name":"ls","arguments":{}}\n</tool_call>', tools=[LS])
    assert scene.manager.prepared == []


@pytest.mark.parametrize("dropped", [[], [{"role": "system", "content": BILLING % 1}]])
def test_thoughts_of_a_chain_of_calls_are_kept_until_the_user_speaks(
    tokenizer: Tokenizer, tmp_path: Path, dropped: list[dict[str, str]]
) -> None:
    scene = make_scene(tokenizer, tmp_path, normalize_prefix="claude-code-billing")
    call = '<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call>'
    (update,) = scene.chat(*dropped, HI, says=f"{THOUGHTS}{call}", tools=[LS], rid="one")
    # A client that was not seen to send thoughts back is expected to drop them.
    assert prepared_text(scene).endswith(f"[user]Hi<eos>\n[assistant]{call}")
    sent_back = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/"}'}}
    thoughts = "Let me think about that for a while."
    messages = [*dropped, HI, assistant("", tool_calls=[sent_back], reasoning_content=thoughts)]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "a.txt"})
    scene.manager.prepared.clear()
    scene.chat(*messages, says=f"{THOUGHTS}{call}", tools=[LS], rid="two")
    assert scene.manager.prepared == [], "now it was seen to, and the chain goes on as it is"
    scene.chat(*messages, says=f"{THOUGHTS}One file.", tools=[LS], rid="three")
    assert prepared_text(scene).endswith(f"[assistant]{call}<eos>\n[tool]a.txt<eos>\n[assistant]One file.")
    assert "<think>" not in prepared_text(scene) and update.pieces


@pytest.mark.parametrize(
    "fields",
    [
        {"is_last_step": True, "job_id": "j"},
        {"retain_ttl": 5.0},
        {"n": 2},
        {"prepare_next_turn": "off"},
        {"no_auto_continue": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_no_next_turn_is_prepared(tokenizer: Tokenizer, tmp_path: Path, fields: dict[str, Any]) -> None:
    config = {name: fields[name] for name in ("prepare_next_turn", "no_auto_continue") if name in fields}
    scene = make_scene(tokenizer, tmp_path, **config)
    fields = {name: value for name, value in fields.items() if name not in config}
    words = f"{THOUGHTS}Ho"
    ids = [*words.encode(), EOS_ID]
    scene.run(HI, says=[(sample, words, ids, STOP) for sample in range(fields.get("n", 1))], **fields)
    assert scene.manager.prepared == []


def test_template_that_hides_the_next_message_prepares_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}<eos>{% if add_generation_prompt %}[assistant]{% endif %}")
    scene = Scene(tokenizer, chat_template=str(template))
    scene.chat(HI, says=f"{THOUGHTS}Ho")
    assert scene.manager.prepared == []


def test_template_that_refuses_the_messages_prepares_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}{{ messages[0].content }}<eos>"
    )
    scene = Scene(tokenizer, chat_template=str(template))
    scene.chat(HI, says=f"{THOUGHTS}Ho")
    assert scene.manager.prepared == []


def test_returned_answer_has_the_parts_of_the_pieces() -> None:
    pieces = [
        Reasoning("Hm"),
        Reasoning("."),
        Text("Yes"),
        CallBegins(0, "ls"),
        CallArguments(0, '{"a": '),
        CallArguments(0, "1}"),
    ]
    message = returned_answer(pieces, with_thoughts=True)
    assert message["content"] == "Yes" and message["reasoning_content"] == "Hm."
    assert message["tool_calls"][0]["function"] == {"name": "ls", "arguments": {"a": 1}}
    assert "reasoning_content" not in returned_answer(pieces, with_thoughts=False)


def test_habits_look_less_often_where_nothing_departs() -> None:
    habits = ReturnHabits()
    looks = 0
    for _ in range(64):
        if habits.is_worth_a_look("scope"):
            looks += 1
            habits.record_look("scope", departs=False)
        else:
            habits.record_look("scope", departs=None)
    assert looks == ReturnHabits.PATIENCE + 7
    habits.record_look("scope", departs=True)
    assert habits.is_worth_a_look("scope") and habits.is_worth_a_look("other")
    for number in range(2 * ReturnHabits.MAX_SCOPES):
        habits.record_return(f"scope {number}", {"reasoning_content": "Hm"})
    assert len(habits._scopes) == ReturnHabits.MAX_SCOPES and MIN_TOKENS > 1
