"""Where a chat parts from the last turn of its conversation, by the place in the text and by its cause."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from baton.entrypoints.chat import divergence
from baton.entrypoints.chat.divergence import (
    EXCERPT_CHARS,
    Divergence,
    Rendered,
    common_prefix,
    common_suffix,
    excerpt,
    find_divergence,
    first_change,
)
from baton.entrypoints.chat.message_digests import (
    Recognition,
    answer_keys,
    answer_message,
    digest_chat,
    recognition_of,
    said_digest,
)
from baton.entrypoints.chat.messages import Conversation
from tests.doubles.chats import make_renderer

TOOL = {"type": "function", "function": {"name": "ls", "parameters": {}}}
THINKS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Only the last message keeps its thoughts, as in Qwen3's template."""


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.fixture(autouse=True)
def a_token_is_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "_ANCHOR_TOKENS", divergence._ANCHOR_CHARS)


SYSTEM = message("system", "cch=a1b2; You are an agent that answers questions about files, and never guesses.")
LIST, FILES = message("user", "List the files."), message("assistant", "There are a.txt and b.txt.")
READ, TEXT = message("user", "Read a.txt, please."), message("tool", "one\ntwo\nthree")


def rendered(conversation: Conversation, answer: str = "", template: str | None = None) -> Rendered:
    """As a recorded turn has it. answer: the text of the model."""
    prompt = (make_renderer(template) if template else make_renderer()).render(conversation)
    _, mark, words = answer.rpartition("</think>")
    said = said_digest(answer_message(words, ()))
    digests = dataclasses.replace(digest_chat(conversation, Recognition(), {}), said=said, thought=bool(mark))
    text = prompt + answer
    ids = np.frombuffer(text.encode("utf-32-le"), dtype=np.int32)
    return Rendered(digests=digests, text=text, prompt_chars=len(prompt), ids=ids)


def compare(old: list[dict], answer: str, new: list[dict], template: str | None = None, **fields: Any) -> Divergence:
    was = rendered(Conversation(messages=old), answer, template)
    now = rendered(Conversation(messages=new, **fields), "", template)
    found = find_divergence(was, now, new, "t1")
    assert found is not None and found.since == "t1"
    # The place, and each span, by hand.
    assert was.text[: common_prefix(was.text, now.text)] == now.text[: common_prefix(was.text, now.text)]
    start, removed, inserted = common_prefix(was.text, now.text), found.removed_chars, found.inserted_chars
    assert was.text[start + removed :][: found.agrees_chars] == now.text[start + inserted :][: found.agrees_chars]
    assert (found.token, found.removed_tokens, found.inserted_tokens) == (start, removed, inserted)
    return found


def test_changed_line_of_the_system_prompt_is_told_from_another_chat():
    old = [SYSTEM, LIST]
    other = message("system", SYSTEM["content"].replace("a1b2", "zz99"))
    found = compare(old, FILES["content"], [other, LIST, FILES, READ])
    assert (found.kind, found.message, found.role) == ("system", 0, "system")
    assert (found.char, found.removed_chars, found.inserted_chars) == (4, 4, 4)
    assert "zz99" in found.now and "a1b2" in found.was and len(found.was) == len(found.now) == EXCERPT_CHARS
    another = compare(old, FILES["content"], [message("system", "Translate."), message("user", "Bonjour")])
    assert (another.kind, another.agrees_chars) == ("system", 0)


def test_length_of_a_changed_line_differs():
    other = message("system", "cch=0;" + SYSTEM["content"].removeprefix("cch=a1b2;"))
    found = compare([SYSTEM, LIST], "ok", [other, LIST, message("assistant", "ok"), READ])
    assert (found.char, found.removed_chars, found.inserted_chars) == (4, 4, 1) and found.agrees_chars > 64


@pytest.mark.parametrize(
    ("new", "kind", "at"),
    [
        ([SYSTEM, LIST], "regenerated", None),
        ([SYSTEM, LIST, FILES], "rewound", None),
        ([SYSTEM, message("user", "List all files."), FILES, READ], "messages", 1),
        ([SYSTEM, LIST, FILES, message("user", "Read b.txt.")], "messages", 3),
        ([SYSTEM, LIST, message("assistant", "None."), READ, message("user", "x")], "messages", 2),
        ([SYSTEM, message("user", "Summary: files were listed.")], "history", 1),
        ([SYSTEM, LIST, FILES, READ, message("assistant", "Four."), LIST], "answer", 4),
    ],
)
def test_kinds_of_edits(new: list[dict], kind: str, at: int | None):
    old = [SYSTEM, LIST, FILES, READ]
    old = old[:2] if kind == "regenerated" else old
    found = compare(old, "One, two, three.", new)
    assert (found.kind, found.message) == (kind, at)


def test_cut_tool_output_names_its_message_and_place():
    long = message("tool", "line\n" * 400)
    cut = message("tool", "line\n" * 3 + "[cut]")
    found = compare([SYSTEM, LIST, FILES, long], "ok", [SYSTEM, LIST, FILES, cut, message("assistant", "ok"), READ])
    assert (found.kind, found.message, found.role, found.char) == ("messages", 3, "tool", 15)


def test_tools_and_settings_are_causes_of_their_own():
    old = [LIST]
    new = [LIST, message("assistant", "ok"), READ]
    assert compare(old, "ok", new, tools=[TOOL]).kind == "tools"
    switch = "{{ thinking }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert compare(old, "ok", new, switch, variables={"thinking": "on"}).kind == "settings"


def test_template_that_drops_thoughts_is_told_from_a_client_that_does():
    old, answer = [LIST], "<think>Hm.</think>ok"
    whole = message("assistant", "ok", reasoning_content="Hm.")
    found = compare(old, answer, [LIST, whole, READ], THINKS)
    assert (found.kind, found.message) == ("template", 1)
    assert compare(old, answer, [LIST, message("assistant", "ok"), READ], THINKS).kind == "thoughts_unsent"
    assert compare(old, answer, [LIST, message("assistant", "no"), READ], THINKS).kind == "answer"
    # The thoughts of an earlier turn, in the prompt of the last.
    found = compare([LIST, whole], "ok", [LIST, whole, message("assistant", "ok"), READ], THINKS)
    assert (found.kind, found.message) == ("template", 1)


def test_extended_text_does_not_diverge():
    old = rendered(Conversation(messages=[LIST]), "ok<eos>\n")
    new = rendered(Conversation(messages=[LIST, message("assistant", "ok"), READ]))
    assert find_divergence(old, new, [LIST, message("assistant", "ok"), READ], "t") is None


def test_excerpts_hold_whole_characters():
    assert excerpt("é" * 100, 50) == "é" * EXCERPT_CHARS
    assert excerpt("ab", 2) == "ab" and excerpt("", 0) == ""
    assert excerpt("a\ud800🙂", 1) == "a\ufffd🙂"
    excerpt("\udfff\ud800" * 40, 20).encode()


def test_prefix_and_suffix_against_slow_twins():
    seed = 7
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(500):
        one = "".join(dice.choices("ab", k=dice.randrange(12)))
        other = "".join(dice.choices("ab", k=dice.randrange(12)))
        same = next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
        assert common_prefix(one, other) == same
        assert common_suffix(one[::-1], other[::-1]) == same


def test_change_of_random_texts_is_found_where_it_was_made():
    seed = 11
    print("seed", seed)
    dice = random.Random(seed)

    def words(count: int) -> str:
        return "".join(dice.choices("abcdefgh ", k=count))

    for _ in range(200):
        before, after = words(dice.randrange(300)), words(dice.randrange(100, 400))
        was, now = "X" + words(dice.randrange(50)), "Y" + words(dice.randrange(50))
        change = first_change(before + was + "Z" + after, before + now + "W" + after + words(20), 64)
        assert change is not None and change.start == len(before)
        assert (change.removed, change.inserted) == (len(was) + 1, len(now) + 1)
        assert change.agrees >= len(after)


def test_repeated_text_and_one_that_ends():
    assert first_change("x" * 500, "x" * 400, 64) == (400, 100, 0, 0)
    assert first_change("x" * 400, "x" * 500, 64) is None
    assert first_change("abc", "abd", 64) == (2, 1, 1, 0)
    assert first_change("a1z", "a22z", 64) == (1, 1, 2, 1)
    change = first_change("y" * 50 + "x" * 500, "x" * 500, 64)
    assert change is not None and change.start == 0 and change.agrees


def test_comparison_is_linear(monkeypatch: pytest.MonkeyPatch):
    """Characters that the comparison of a long text slices, counted."""
    sliced = 0

    class Counted(str):
        __slots__ = ()

        def __getitem__(self, key: Any) -> Any:
            nonlocal sliced
            part = str.__getitem__(self, key)
            sliced += len(part)
            return part

    def count(length: int) -> int:
        nonlocal sliced
        sliced = 0
        text = "".join(random.Random(3).choices("abcdefgh", k=length))
        divergence.common_prefix(Counted(text + "1"), Counted(text + "2"))
        divergence.common_suffix(Counted("1" + text), Counted("2" + text))
        return sliced

    assert count(200_000) < 2.2 * count(100_000)


# -- recognition -------------------------------------------------------------------------------------------------------


def keys(*messages: dict[str, Any]) -> tuple[bytes, ...]:
    return recognition_of(Conversation(messages=list(messages))).keys


def answered(asked: list[dict[str, Any]], answer: dict[str, Any]) -> tuple[bytes, ...]:
    return answer_keys(recognition_of(Conversation(messages=asked)).last, answer)


def test_conversation_is_recognised_by_what_is_left_of_it():
    turn = keys(SYSTEM, LIST, FILES, READ)
    other_system = message("system", "x-anthropic-billing-header: cch=2;\nYou are another.")
    assert set(keys(other_system, LIST, FILES, READ, FILES, LIST)) & set(turn)
    assert set(keys(SYSTEM, message("user", "Hallo"), FILES, READ)) & set(turn)
    assert not set(keys(SYSTEM, message("user", "Hallo"))) & set(turn)


def test_equal_first_words_are_no_proof_of_a_conversation():
    """Without keys, all users of a server are one client."""
    secret = message("system", "The password is swordfish.")
    turn = keys(secret, LIST) + answered([secret, LIST], FILES)
    assert set(keys(secret, LIST)) & set(turn), "the same chat again"
    assert not set(keys(SYSTEM, LIST)) & set(turn)
    assert not set(keys(SYSTEM, LIST, message("assistant", "Which?"), READ)) & set(turn)
    assert set(keys(SYSTEM, LIST, FILES, READ)) & set(turn), "it knows the answer"


def test_answer_has_the_keys_that_it_has_when_it_comes_back():
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": {"path": "/"}}}
    sent = message("assistant", "So:", tool_calls=[call], reasoning_content="Hm.")
    asked = [SYSTEM, LIST]
    assert set(answered(asked, answer_message("So:\n", [("ls", '{"path": "/"}')]))) & set(keys(SYSTEM, LIST, sent))
    assert not set(answered(asked, answer_message("So:", [("ls", "{}")]))) & set(keys(SYSTEM, LIST, sent))


def test_deeply_nested_messages_have_digests():
    deep: Any = {}
    for _ in range(5000):
        deep = {"a": deep}
    call = {"function": {"name": "f", "arguments": deep}}
    assert keys(message("assistant", "", tool_calls=[call]))
    assert (
        len(
            digest_chat(
                Conversation(messages=[message("assistant", "", tool_calls=[call])]), Recognition(), {}
            ).messages
        )
        == 1
    )
